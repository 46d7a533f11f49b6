"""Foreign: a stream of a worker that keeps no journal (SGLang, vLLM, any OpenAI server) goes on at
another one from its prompt and its text so far. Opt-in by --resume-foreign: only greedy text, and
nothing whose state the text does not tell, such as a grammar, penalties or stop strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from radixlm.router.call import Call
from radixlm.router.worker import Worker

_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/generate": "text"}
_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
_DEFAULTS = {"/v1/completions": {"max_tokens": 16}, "/generate": {"max_new_tokens": 128}}
_KNOWN = frozenset(
    "model stream stream_options user metadata temperature top_p top_k min_p seed sampling_seed "
    "rid request_id priority cache_salt extra_key routing_key lora_path ignore_eos logit_bias "
    "stop_token_ids skip_special_tokens spaces_between_special_tokens add_special_tokens "
    "chat_template chat_template_kwargs reasoning_effort separate_reasoning sampling_params".split()
).union(_LIMITS, _PROMPTS.values())
"""Fields that change nothing where the text so far is part of the prompt. Others, also those that
are not known here, must ask for nothing."""
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "repetition_penalty": 1, "response_format": {"type": "text"},
    "add_generation_prompt": True,
}  # fmt: skip
_BROKEN = "\N{REPLACEMENT CHARACTER}".encode()  # the text ends within a character


def can_go_on(call: Call) -> bool:
    """Whether the text so far is all that a worker needs besides the body."""
    fields, key = call.fields, _PROMPTS.get(call.path)
    sampling = (fields.get("sampling_params") or {}) if key == "text" else fields
    if key is None or not isinstance(sampling, dict) or not _is_plain({**fields, **sampling}):
        return False
    temperature, prompt = sampling.get("temperature"), fields.get(key)
    if temperature is False or temperature != 0:
        return False
    if key != "messages":
        return isinstance(prompt, str)
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return isinstance(last, dict) and last.get("role") != "assistant"


def _is_plain(fields: Mapping[str, Any]) -> bool:
    if fields.get("add_generation_prompt") is False:
        return False
    for key, value in fields.items():
        if key in _LIMITS and value is not None and type(value) is not int:
            return False
        if key in _KNOWN or (key in _NEUTRAL and value == _NEUTRAL[key]):
            continue
        # logprobs 0 are those of the chosen tokens
        if value not in _NOTHING or (type(value) is int and key.endswith("logprobs")):
            return False
    return True


def is_foreign(worker: Worker) -> bool:
    """Whether ``worker`` keeps no journal and takes whole requests."""
    return worker.worker_type == "regular" and "resume_digest" not in worker.facts


class ForeignText:
    """The text of one stream, and what its next worker is asked."""

    __slots__ = (
        "_base", "_blank", "_call", "_events", "_first", "_gap", "_has_moved", "_has_role", "_held",
        "_ids", "_is_chat", "_is_open", "_is_whole", "_new_ids", "_prefix", "_prompt_tokens",
        "_text", "_told", "_version",
    )  # fmt: skip

    def __init__(self, call: Call, worker: Worker) -> None:
        """``worker``: the one that answers first."""
        self._call, self._version = call, worker.facts.get("weight_version")
        self._is_chat = call.path == "/v1/chat/completions"
        self._is_whole = call.path == "/generate"  # each event has all of the text
        self._is_open = not (self._is_whole and _in_pieces(worker))
        self._has_moved = self._has_role = False
        self._first: dict[str, Any] | None = None  # id and time of the first event
        self._prompt_tokens: int | None = None
        # of the workers before: their text, the white space after it, ids, tokens of the text
        self._prefix, self._gap, self._base = "", "", 0
        self._ids: list[int] = []
        # of this worker; blank: so many events at its end are white space; held: of the gap
        self._text, self._new_ids, self._held = bytearray(), list[int](), ""
        self._events = self._told = self._blank = 0

    @property
    def num_bytes(self) -> int:
        """What it keeps, about."""
        return len(self._text) + len(self._prefix) + 36 * (len(self._ids) + len(self._new_ids))

    # ---- the next worker -----------------------------------------------------------------------

    def can_resume(self, worker: Worker) -> bool:
        """Whether ``worker`` can go on from here."""
        if not self._is_open or self._text.endswith(_BROKEN) or not is_foreign(worker):
            return False
        is_same = worker.facts.get("weight_version") == self._version
        can_read = not (self._is_whole and _in_pieces(worker))
        return is_same and can_read and all(count > 0 for count in self._left().values())

    def stop(self) -> None:
        """Keep no more text: it goes on nowhere else."""
        self._is_open = False

    def lost(self) -> None:
        """The worker died: the next one goes on after what was sent."""
        self._base = self._num_tokens()
        text = self._prefix + self._gap + self._text.decode()
        # A chat template may drop white space at the end of a message: the next worker writes it
        # again, and it is left out.
        self._prefix = text.rstrip() if self._is_chat else text
        self._gap = self._held = text[len(self._prefix) :]
        self._ids, self._has_moved = self._ids + self._new_ids, True
        self._text, self._new_ids = bytearray(), []
        self._events = self._told = self._blank = 0

    def _num_tokens(self) -> int:
        """Of the text for the next worker: as told, else one an event."""
        return self._base + max(0, (self._told or self._events) - self._blank)

    def _left(self) -> dict[str, int]:
        """The limits of tokens, less what was sent."""
        fields, count = self._call.fields, self._num_tokens()
        if self._is_whole:
            fields = fields.get("sampling_params") or {}
        limits = {key: fields[key] for key in _LIMITS if fields.get(key) is not None}
        limits = limits or _DEFAULTS.get(self._call.path, {})
        return {key: limit - count for key, limit in limits.items()}

    def body(self, extra: Mapping[str, Any]) -> bytes:
        """The request that goes on, with the fields ``extra``. After ``lost``."""
        fields, key, text = self._call.fields, _PROMPTS[self._call.path], self._prefix
        made: dict[str, Any] = self._left()
        if self._is_whole:
            made = {"sampling_params": {**(fields.get("sampling_params") or {}), **made}}
        if not self._is_chat:
            made[key] = fields[key] + text
        elif text:
            made[key] = [*fields[key], {"role": "assistant", "content": text}]
            made |= {"continue_final_message": True, "add_generation_prompt": False}
        return orjson.dumps({**fields, **extra, **made})

    # ---- events --------------------------------------------------------------------------------

    def feed(self, data: bytes, separator: bytes) -> bytes:
        """Read whole blocks of the worker's answer; the blocks for the client, which are the same
        while the first worker answers."""
        if not (self._is_open or self._has_moved):
            return data
        made = []
        for block in data.split(separator):
            event = self._parsed(block)
            if event is None:
                made.append(block)
            elif self._read(event) and self._has_moved:
                made.append(b"data: " + orjson.dumps(event))
        return separator.join(made) if self._has_moved else data

    def _parsed(self, block: bytes) -> dict[str, Any] | None:
        """The JSON of a block; None: it has none."""
        content = block.partition(b"data:")[2].strip()
        if not content or content == b"[DONE]":
            return None
        try:
            event = orjson.loads(content)
        except orjson.JSONDecodeError:
            event = None
        if isinstance(event, dict) and "error" not in event:
            return event
        self.stop()
        return None

    def _read(self, event: dict[str, Any]) -> bool:
        """Keep what ``event`` says, and make it one of the first answer; False: it is empty now."""
        meta = event.get("meta_info") if self._is_whole else event
        if not isinstance(meta, dict):
            self.stop()
            return True
        if self._first is None:
            self._first = {key: meta[key] for key in ("id", "created") if key in meta}
        meta.update(self._first)
        usage = meta if self._is_whole else event.get("usage")
        if isinstance(usage, dict):
            self._count(usage)
        return self._read_whole(event, meta) if self._is_whole else self._read_piece(event)

    def _count(self, usage: dict[str, Any]) -> None:
        told, asked = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if type(told) is not int or type(asked) is not int:
            return
        if self._prompt_tokens is None:
            self._prompt_tokens = asked - self._base
        self._told, total = told, told + self._base
        usage |= {"completion_tokens": total, "prompt_tokens": self._prompt_tokens}
        if "total_tokens" in usage:
            usage["total_tokens"] = total + self._prompt_tokens

    def _read_whole(self, event: dict[str, Any], meta: dict[str, Any]) -> bool:
        """An event of /generate, with the text of this worker so far."""
        text, ids = event.get("text"), event.get("output_ids")
        if not isinstance(text, str):
            self.stop()
            return True
        content = text.encode()
        self._is_open &= content.startswith(self._text) and meta.get("finish_reason") is None
        if self._is_open:
            self._events += len(content) > len(self._text)
            self._text[:] = content
            self._new_ids = ids if isinstance(ids, list) else []
        event["text"] = self._prefix + text
        if isinstance(ids, list):
            event["output_ids"] = self._ids + ids
        return True

    def _read_piece(self, event: dict[str, Any]) -> bool:
        """An event of the OpenAI routes, with a piece of the text."""
        choices = event.get("choices")
        if not choices:
            return True  # usage
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        choice = choice if isinstance(choice, dict) else {}
        delta, key = (choice.get("delta"), "content") if self._is_chat else (choice, "text")
        text = delta.get(key) or "" if isinstance(delta, dict) else None
        if not delta or not isinstance(text, str):
            self._is_open &= isinstance(text, str) and bool(choice)
            self._is_open &= choice.get("finish_reason") is None
            return True
        is_other = self._is_chat and any(delta[one] for one in delta.keys() - {"role", "content"})
        is_last = choice.get("finish_reason") is not None
        self._is_open &= not (is_other or is_last or choice.get("logprobs"))
        if self._has_moved and self._has_role:
            delta.pop("role", None)
        self._has_role |= bool(delta.get("role"))
        kept = self._kept(text)
        if kept != text:
            delta[key] = kept
        return bool(kept or is_last or is_other or delta.get("role"))

    def _kept(self, text: str) -> str:
        """Keep a piece of the text; without what the client has of it."""
        if text:
            self._events += 1
            self._blank = self._blank + 1 if self._is_chat and text.isspace() else 0
        held, same = self._held, 0
        while same < len(held) and held[same] == text[same : same + 1]:
            same += 1
        kept = text[same:]
        self._held = "" if kept else held[same:]
        if self._is_open:
            self._text += kept.encode()
        return kept


def _in_pieces(worker: Worker) -> bool:
    """Whether /generate of an SGLang server sends the text in pieces."""
    names = ("stream_output", "incremental_streaming_output")
    return any(worker.facts.get(name) for name in names)
