"""Log-probabilities in the forms of chat and of completions."""

from collections.abc import Mapping
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
        rows = _rows(logprobs, place, top)
        entry["top_logprobs"] = [_entry(tokenizer, t, lp, as_ids) for lp, t in rows]
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
                rows = _rows(logprobs, place, self._top)
                record["top_logprobs"].append(self._row(rows, logprob, token_id))
        return record

    def _row(
        self, rows: TopLogprobs, logprob: float | None, token_id: int
    ) -> dict[str, float | None] | None:
        """The chosen token is always among them, first if it is none of the likeliest, as vLLM."""
        if logprob is None:
            return None
        row = {self._name(t): _finite(lp) for lp, t in rows}
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


def asked_ids(ids: list[int] | None, rest: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of vLLM's ``logprob_token_ids``, each once. InvalidRequest without ``logprobs``,
    and with another of ``rest``, fields that it does not go with."""
    given = {name for name, value in rest.items() if value is not None and value is not False}
    if ids and "logprobs" not in given:
        raise InvalidRequest("logprob_token_ids: send logprobs too", "logprob_token_ids")
    for name in ("echo", "prompt_logprobs", "use_beam_search"):
        if ids and name in given:
            raise InvalidRequest(f"logprob_token_ids: not with {name}", "logprob_token_ids")
    return tuple(dict.fromkeys(ids or ()))


def prompt_need(count: int, top: int, vocab: int, streams: bool) -> LogprobParams:
    """What ``prompt_logprobs`` asks of the engine, and ``top`` likeliest tokens of the output."""
    if streams and count:
        raise InvalidRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    return LogprobParams(0, max(top, asked_top(count, vocab, "prompt_logprobs")))


def _rows(logprobs: Logprobs, place: int, top: int) -> TopLogprobs:
    """The likeliest tokens of a position; in their place the chosen one and those that the request
    named, if it named any."""
    asked = logprobs.asked[place] if place < len(logprobs.asked) else None
    if asked is None:
        return _likeliest(logprobs.top[place] if place < len(logprobs.top) else None, top)
    logprob, chosen = logprobs.chosen[place]
    return [(logprob or 0.0, chosen), *(row for row in asked if row[1] != chosen)]


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
