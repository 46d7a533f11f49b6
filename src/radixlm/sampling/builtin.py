"""Logit processors that come with the server. Requests give their options in ``custom_params``.

disallowed_tokens   {"token_ids": [..]}: these are never chosen.
no_repeat_ngram     {"ngram_size": n, "window_size": w, "whitelist_token_ids": [..]}: no n tokens
                    in a row occur twice within the last w tokens of the output (w 0: all of it).
thinking_budget     {"thinking_budget": n, "start": "<think>", "end": "</think>", "text": "",
                    "excluded": []}: a reasoning block of n tokens is ended by writing the text and
                    the end marker. With "excluded" (markers of a token each; n may be missing) they
                    and EOS are not chosen within it.

Legend: R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.sampling.processors import RowInfo, ServerFacts

_NEG_INF = float("-inf")
Params = Mapping[str, Any] | None


def read_int(params: Params, name: str, low: int, default: int | None = None) -> int:
    """An integer option; ValueError if it is missing, too small or of another type."""
    value = (params or {}).get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r:.40}")
    return value


def token_ids(params: Params, name: str, vocab_size: int) -> list[int]:
    """A list of token ids; ValueError for anything else."""
    value = (params or {}).get(name, [])
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError(f"{name} must be a list of token ids")
    bad = next((i for i in value if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name}: {bad} is not a token id; the vocabulary has {vocab_size}")
    return list(value)


class DisallowedTokens:
    """Never chooses some tokens."""

    def bind(self, facts: ServerFacts) -> None:
        """See LogitProcessor."""
        self._vocab_size = facts.vocab_size

    def check(self, params: Params) -> None:
        """See LogitProcessor."""
        ids = token_ids(params, "token_ids", self._vocab_size)
        if not ids or len(set(ids)) >= self._vocab_size:
            raise ValueError("token_ids must name at least one token and leave at least one")

    def __call__(
        self, logits_RV: Tensor, params: Sequence[Params], rows: Sequence[RowInfo]
    ) -> Tensor:
        for logits_V, options in zip(logits_RV, params, strict=True):
            logits_V[list((options or {})["token_ids"])] = _NEG_INF
        return logits_RV


class NoRepeatNgram:
    """Lets no n tokens in a row occur twice."""

    def bind(self, facts: ServerFacts) -> None:
        """See LogitProcessor."""
        self._vocab_size = facts.vocab_size

    def check(self, params: Params) -> None:
        """See LogitProcessor."""
        read_int(params, "ngram_size", 1)
        read_int(params, "window_size", 0, 0)
        token_ids(params, "whitelist_token_ids", self._vocab_size)

    def __call__(
        self, logits_RV: Tensor, params: Sequence[Params], rows: Sequence[RowInfo]
    ) -> Tensor:
        for logits_V, options, row in zip(logits_RV, params, rows, strict=True):
            size = read_int(options, "ngram_size", 1)
            window = read_int(options, "window_size", 0, 0)
            repeated = _followers(np.asarray(row.output_ids[-window:], np.int64), size)
            allowed = (options or {}).get("whitelist_token_ids", [])
            banned = np.setdiff1d(repeated, np.asarray(allowed, np.int64))
            if 0 < len(banned) < len(logits_V):
                logits_V[torch.from_numpy(banned)] = _NEG_INF
        return logits_RV


def _followers(ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Tokens that followed earlier occurrences of the last ``size`` - 1 tokens."""
    if len(ids) < size:
        return ids[:0]
    grams = np.lib.stride_tricks.sliding_window_view(ids, size)
    tail = ids[len(ids) - size + 1 :]
    followers: NDArray[np.int64] = ids[size - 1 :][(grams[:, :-1] == tail).all(axis=1)]
    return followers


class ThinkingBudget:
    """Ends a reasoning block that has used up its tokens, and excludes some from it."""

    def bind(self, facts: ServerFacts) -> None:
        """See LogitProcessor."""
        self._facts = facts
        self._token_ids: dict[str, list[int]] = {}

    def check(self, params: Params) -> None:
        """See LogitProcessor."""
        self._excluded(params)
        if not (params or {}).get("excluded"):
            read_int(params, "thinking_budget", 0)
        for text in self._texts(params)[:2]:
            if not self._encode(text):
                raise ValueError(f"{text!r:.40} is no token of this model")

    def __call__(
        self, logits_RV: Tensor, params: Sequence[Params], rows: Sequence[RowInfo]
    ) -> Tensor:
        for logits_V, options, row in zip(logits_RV, params, rows, strict=True):
            used = self._used(options, row)
            if used is None:
                continue
            logits_V[self._excluded(options)] = _NEG_INF
            forced = self._forced(options, used)
            if forced is not None:
                logit = logits_V[forced].item()
                logits_V.fill_(_NEG_INF)
                logits_V[forced] = max(logit, 0.0)
        return logits_RV

    def _texts(self, params: Params) -> tuple[str, str, str]:
        """Start marker, end marker, and the text that is written before the end marker."""
        start, end, text = ((params or {}).get(name, default) for name, default in _TEXTS)
        if not all(isinstance(t, str) and len(t) <= _MAX_CHARS for t in (start, end, text)):
            raise ValueError(
                f"start, end and text must be texts of at most {_MAX_CHARS} characters"
            )
        return str(start), str(end), str(text)

    def _used(self, params: Params, row: RowInfo) -> int | None:
        """Tokens of the reasoning block that goes on, without those of the prompt; None outside of
        one."""
        start, end, _ = (self._encode(text) for text in self._texts(params))
        ids = [*row.prompt_ids, *row.output_ids]
        began = _last(ids, start)
        if began < 0 or _last(ids, end) >= began + len(start):
            return None
        return len(ids) - max(began + len(start), len(row.prompt_ids))

    def _forced(self, params: Params, used: int) -> int | None:
        """The token that must come next, None if the model may choose."""
        budget = read_int(params, "thinking_budget", 0, _MAX_BUDGET)
        _, end, text = (self._encode(text) for text in self._texts(params))
        over, closing = used - budget, text + end
        return closing[over] if 0 <= over < len(closing) else None

    def _excluded(self, params: Params) -> list[int]:
        """Tokens that are not chosen within the block."""
        markers = (params or {}).get("excluded", [])
        if not isinstance(markers, list) or not all(isinstance(m, str) for m in markers):
            raise ValueError("excluded must be a list of texts")
        tokens = [ids[0] for ids in map(self._encode, markers) if len(ids) == 1]
        return [*tokens, *self._facts.eos_ids] if markers else []

    def _encode(self, text: str) -> list[int]:
        if text not in self._token_ids:
            if len(self._token_ids) >= _MAX_TEXTS:
                self._token_ids.clear()
            self._token_ids[text] = self._facts.tokenizer.encode(text, False)
        return self._token_ids[text]


_TEXTS = (("start", "<think>"), ("end", "</think>"), ("text", ""))
_MAX_CHARS = 1000
_MAX_TEXTS = 64
_MAX_BUDGET = 1 << 62  # no bound


def _last(ids: list[int], part: list[int]) -> int:
    """Where ``part`` occurs last in ``ids``, -1 if nowhere."""
    haystack = np.asarray(ids, np.int64)
    if len(haystack) < len(part):
        return -1
    grams = np.lib.stride_tricks.sliding_window_view(haystack, len(part))
    found = np.flatnonzero((grams == np.asarray(part)).all(axis=1))
    return int(found[-1]) if len(found) else -1
