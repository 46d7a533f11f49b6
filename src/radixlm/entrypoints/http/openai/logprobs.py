"""Log-probabilities in the forms of chat and of completions."""

from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Logprobs, TopLogprobs
from radixlm.wire.requests import LogprobParams

ALL = -1  # of vLLM: all tokens of the vocabulary
LOWEST = -9999.0  # JSON has no infinity


def token_name(tokenizer: Tokenizer, token_id: int, as_ids: bool = False) -> str:
    """The token's text; its bytes if it is not a whole character. ``as_ids``: vLLM's form."""
    if as_ids:
        return f"token_id:{token_id}"
    text = tokenizer.token_text(token_id)
    if "�" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def _finite(value: float | None) -> float | None:
    return None if value is None else max(value, LOWEST)


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Logprobs | None, top: int, as_ids: bool = False
) -> list[dict[str, Any]]:
    """``content`` of a chat choice's logprobs, one entry a token; ``as_ids`` as of token_name."""
    entries: list[dict[str, Any]] = []
    if logprobs is None:
        return entries
    for place, (logprob, token_id) in enumerate(logprobs.chosen):
        entry = _entry(tokenizer, token_id, logprob or 0.0, as_ids)
        rows = logprobs.top[place] if place < len(logprobs.top) else None
        entry["top_logprobs"] = [
            _entry(tokenizer, t, lp, as_ids) for lp, t in _likeliest(rows, top)
        ]
        entries.append(entry)
    return entries


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    named = token_name(tokenizer, token_id, True) if as_ids else tokenizer.token_text(token_id)
    return {
        "token": named,
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """Builds the lists of /v1/completions; offsets count on over the chunks of a stream."""

    def __init__(self, tokenizer: Tokenizer, top: int, as_ids: bool = False) -> None:
        self._tokenizer, self._top, self._as_ids = tokenizer, top, as_ids
        self._offset = 0

    def skip(self, num_chars: int) -> None:
        """Text that has no log-probabilities comes first."""
        self._offset += num_chars

    def read(self, *parts: Logprobs | None) -> dict[str, Any]:
        """The record of ``parts``, prompt before output."""
        record: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for logprobs in parts:
            for place, (logprob, token_id) in enumerate(logprobs.chosen if logprobs else ()):
                record["tokens"].append(self._name(token_id))
                record["token_logprobs"].append(_finite(logprob))
                record["text_offset"].append(self._offset)
                self._offset += len(self._tokenizer.token_text(token_id))
                assert logprobs is not None
                rows = logprobs.top[place] if place < len(logprobs.top) else None
                record["top_logprobs"].append(self._row(rows, logprob, token_id))
        return record

    def _row(
        self, rows: TopLogprobs | None, logprob: float | None, token_id: int
    ) -> dict[str, float | None] | None:
        """The chosen token is always among them, first if it is none of the likeliest, as vLLM."""
        if logprob is None:
            return None
        row = {self._name(t): _finite(lp) for lp, t in _likeliest(rows, self._top)}
        chosen = self._name(token_id)
        return row if chosen in row else {chosen: _finite(logprob), **row}

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer, token_id, self._as_ids)


def asked_top(count: int | None, vocab: int, param: str) -> int:
    """How many likeliest tokens a field asks for: None none, -1 all of the vocabulary.
    InvalidRequest below -1 and above ``vocab``."""
    if count is not None and not ALL <= count <= vocab:
        message = f"{param} must be from 0 to {vocab}, or -1 for all tokens, got {count}"
        raise InvalidRequest(message, param)
    return vocab if count == ALL else count or 0


def prompt_need(count: int, top: int, vocab: int, streams: bool) -> LogprobParams:
    """What ``prompt_logprobs`` asks of the engine, and ``top`` likeliest tokens of the output."""
    if streams and count:
        raise InvalidRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    return LogprobParams(0, max(top, asked_top(count, vocab, "prompt_logprobs")))


def _likeliest(rows: TopLogprobs | None, top: int) -> TopLogprobs:
    """The first ``top`` rows; -1: all."""
    return (rows or []) if top == ALL else (rows or [])[:top]


def prompt_rows(
    tokenizer: Tokenizer, logprobs: Logprobs | None, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each position of the prompt, token id -> log-probability,
    rank and text; None for the first. The rank of a token that is not among the ``top`` is None."""
    rows: list[dict[str, dict[str, Any]] | None] = []
    for place, (logprob, token_id) in enumerate(logprobs.chosen if logprobs else ()):
        if logprob is None:
            rows.append(None)
            continue
        assert logprobs is not None
        likeliest = logprobs.top[place] if place < len(logprobs.top) else None
        row = {
            str(t): _ranked(tokenizer, t, lp, rank + 1)
            for rank, (lp, t) in enumerate(_likeliest(likeliest, top))
        }
        row.setdefault(str(token_id), _ranked(tokenizer, token_id, logprob, None))
        rows.append(row)
    return rows


def _ranked(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None
) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
