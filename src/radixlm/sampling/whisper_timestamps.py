"""The logit processor of transcripts: which tokens may stand where, with marks of time among them.

Options (``custom_params``): ``suppress``: ids that are never chosen. ``first_suppress``: not as the
first token. ``first_only``: the first token is one of these. ``times_from``: ids from here on are
marks of time, which come in pairs around each segment and never go back; ``end``: the id that ends
a text, ids below it are its words; ``latest_first``: so many marks from the earliest may begin.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.sampling.builtin import Params, token_ids, whole
from radixlm.sampling.processors import RowInfo, ServerFacts

_NO = float("-inf")


class WhisperTimestamps:
    """The rules under which Whisper was trained to write."""

    def bind(self, facts: ServerFacts) -> None:
        """See LogitProcessor."""
        self._vocab_size = facts.vocab_size

    def check(self, params: Params) -> None:
        """See LogitProcessor."""
        for name in ("suppress", "first_suppress", "first_only"):
            token_ids(params, name, self._vocab_size)
        if (params or {}).get("times_from") is not None:
            whole(params, "times_from", 1)
            whole(params, "end", 0)
        if (params or {}).get("latest_first") is not None:
            whole(params, "latest_first", 0)

    def __call__(
        self, logits_RV: Tensor, params: Sequence[Params], rows: Sequence[RowInfo]
    ) -> Tensor:
        for logits_V, given, row in zip(logits_RV, params, rows, strict=True):
            held = given or {}
            logits_V[list(held.get("suppress", ()))] = _NO
            if not row.output_ids:
                logits_V[list(held.get("first_suppress", ()))] = _NO
                only = list(held.get("first_only", ()))
                if only:
                    kept = logits_V[only].clone()
                    logits_V.fill_(_NO)
                    logits_V[only] = kept
            if held.get("times_from") is not None:
                most = held.get("latest_first")
                _mark(logits_V, row.output_ids, held["times_from"], held["end"], most)
        return logits_RV


def _mark(logits_V: Tensor, ids: Sequence[int], times: int, end: int, most: int | None) -> None:
    """Close what may not come next; ``times`` is the first mark, the token before it forbids
    them."""
    logits_V[times - 1] = _NO
    is_mark = [token >= times for token in ids[-2:]]
    was_mark = bool(is_mark) and is_mark[-1]
    closes = len(is_mark) < 2 or is_mark[-2]
    if was_mark and closes:
        logits_V[times:] = _NO
    elif was_mark:
        logits_V[:end] = _NO
    last = next((token for token in reversed(ids) if token >= times), None)
    if last is not None:
        logits_V[times : last + (not (was_mark and not closes))] = _NO
    if not ids:
        logits_V[:times] = _NO
        if most is not None:
            logits_V[times + most + 1 :] = _NO
    scores = torch.log_softmax(logits_V, -1)
    if torch.logsumexp(scores[times:], -1) > scores[:times].max():
        logits_V[:times] = _NO
