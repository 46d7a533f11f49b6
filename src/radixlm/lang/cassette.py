"""Cassette: a backend that keeps the results of calls in a file, and answers equal calls from it.

For tests that need no model, and for programs that go on after their process has died: run again,
they find the calls that had ended. A call is known by its kind, the text, messages and media before
it, and its parameters; the n-th of several equal ones by its number. The file has JSON lines: a
header, then a line a call, written when the call ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from radixlm.lang.backend.base_backend import BaseBackend, Done
from radixlm.lang.chat_template import get_chat_template
from radixlm.lang.choices import ChoicesDecision
from radixlm.lang.global_config import backend_of
from radixlm.lang.model_template import ModelTemplate

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams, SglSelect

log = logging.getLogger(__name__)

FORMAT = 1
_SHOWN = 60  # characters of a text in an error


class CassetteError(RuntimeError):
    """A call that the file does not have, or a file that cannot be read."""


class Cassette(BaseBackend):
    """``backend``: computes the calls that the file lacks; None: those are errors. ``seed``: from
    which calls that name no seed get theirs, so that a second run says the same; a file keeps its
    own."""

    def __init__(
        self, path: str | os.PathLike[str], backend: Any = None, seed: int | None = None
    ) -> None:
        super().__init__()
        self._path = Path(path)
        self._inner = backend = backend_of(backend) if backend is not None else None
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()  # calls of this run by key
        self._known: dict[tuple[str, int], dict[str, Any]] = {}
        self._used: set[tuple[str, int]] = set()
        header = self._read()
        if header is None:
            if backend is None:
                raise CassetteError(f"{self._path} is not there: a backend records it")
            template = backend.get_chat_template()
            header = {
                "format": FORMAT,
                "model": backend.get_model_name(),
                "is_chat_model": backend.is_chat_model,
                "chat_template": template.name,
                "model_template": template.facts if isinstance(template, ModelTemplate) else None,
                "seed": secrets.randbits(31) if seed is None else seed,
            }
            self._write(header)
        elif backend is not None and header["model"] != (model := backend.get_model_name()):
            log.warning("%s answers calls by those of %s, not of %s", path, header["model"], model)
        self._header = header
        if backend is not None:
            self.chat_template = backend.get_chat_template()
        elif (facts := header.get("model_template")) is not None:
            self.chat_template = ModelTemplate.of(facts)
        else:
            self.chat_template = get_chat_template(header["chat_template"])
        self.is_immediate = backend is None or backend.is_immediate

    def _read(self) -> dict[str, Any] | None:
        """Take the calls of the file; its header, None if there is no file."""
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        header: dict[str, Any] | None = None
        end = 0
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # the process died while it wrote: the call is computed again
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise CassetteError(f"{self._path}, line {number}: {error}") from error
            end += len(line)
            if header is None:
                header = record
                if not isinstance(record, dict) or record.get("format") != FORMAT:
                    raise CassetteError(f"{self._path} is no cassette of format {FORMAT}")
            elif isinstance(record, dict) and {"key", "number", "kind", "text"} <= record.keys():
                self._known[record["key"], record["number"]] = record
            else:
                raise CassetteError(f"{self._path}, line {number}: it is no call")
        if end < sum(map(len, lines)):
            os.truncate(self._path, end)
        return header

    def _write(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        with self._lock, self._path.open("ab", buffering=0) as file:
            file.write(line)

    # ---- calls -----------------------------------------------------------------------------

    def start_generate(self, s: StreamExecutor, params: SglSamplingParams, done: Done) -> None:
        call = self._call("gen", s, asdict(params))
        if (record := self._recorded(call, done)) is not None:
            done((record["value"], record["meta_info"]))
        elif self._inner is not None:
            keep = self._keeper(
                call, done, lambda found: {"value": found[0], "meta_info": found[1]}
            )
            self._inner.start_generate(s, self._seeded(params, call), keep)

    def start_stream(
        self,
        s: StreamExecutor,
        params: SglSamplingParams,
        add: Callable[[str, Any], None],
        done: Done,
    ) -> None:
        call = self._call("gen", s, asdict(params))
        if (record := self._recorded(call, done)) is not None:
            add(record["value"], record["meta_info"])
            done(None)
        elif self._inner is not None:
            pieces: list[str] = []
            last: Any = None

            def piece(text: str, meta_info: Any) -> None:
                nonlocal last
                pieces.append(text)
                last = meta_info
                add(text, meta_info)

            keep = self._keeper(call, done, lambda _: {"value": "".join(pieces), "meta_info": last})
            self._inner.start_stream(s, self._seeded(params, call), piece, keep)

    def start_select(self, s: StreamExecutor, expr: SglSelect, done: Done) -> None:
        method = type(expr.choices_method).__name__
        asked = {"choices": expr.choices, "temperature": expr.temperature, "method": method}
        call = self._call("select", s, asked)
        if (record := self._recorded(call, done)) is not None:
            done(ChoicesDecision(record["value"], record["meta_info"]))
        elif self._inner is not None:
            keep = self._keeper(
                call, done, lambda one: {"value": one.decision, "meta_info": one.meta_info}
            )
            self._inner.start_select(s, expr, keep)

    def _call(self, kind: str, s: StreamExecutor, asked: dict[str, Any]) -> dict[str, Any]:
        """What a call is known by; its number is that among equal ones of this run."""
        asked = {name: value for name, value in asked.items() if value is not None}
        media = [hashlib.sha256(data.encode()).hexdigest() for _, data in s.images_]
        messages = s.messages_ if s.backend.is_chat_model else None
        known_by = [kind, s.text_, messages, media, asked]
        text = orjson.dumps(known_by, default=str, option=orjson.OPT_SORT_KEYS)
        key = hashlib.sha256(text).hexdigest()
        with self._lock:
            number = self._seen[key]
            self._seen[key] += 1
        return {"key": key, "number": number, "kind": kind, "text": s.text_, "asked": asked}

    def _recorded(self, call: dict[str, Any], done: Done) -> dict[str, Any] | None:
        """The record of a call. If there is none and no backend either, ``done`` gets the error."""
        place = call["key"], call["number"]
        record = self._known.get(place)
        if record is not None:
            self._used.add(place)
        elif self._inner is None:
            done(None, CassetteError(self._difference(call)))
        return record

    def _keeper(
        self, call: dict[str, Any], done: Done, read: Callable[[Any], dict[str, Any]]
    ) -> Done:
        """Write the result, then pass it on."""

        def keep(result: Any, error: BaseException | None = None) -> None:
            if error is None:
                try:
                    self._write({**call, **read(result)})
                except Exception as failed:
                    error = failed
            if error is not None:
                done(None, error)
            else:
                done(result)

        return keep

    def _seeded(self, params: SglSamplingParams, call: dict[str, Any]) -> SglSamplingParams:
        if params.seed is not None:
            return params
        known_by = f"{self._header['seed']} {call['key']} {call['number']}".encode()
        seed = int.from_bytes(hashlib.sha256(known_by).digest()[:4], "big") >> 1
        return replace(params, seed=seed)

    def _difference(self, call: dict[str, Any]) -> str:
        """How the call differs from the nearest one of the file that was not asked for yet."""
        left = [record for place, record in self._known.items() if place not in self._used]
        start = f"{self._path} has no such call: {call['kind']} behind {call['text'][-_SHOWN:]!r}"
        if not left:
            return f"{start}; all of its {len(self._known)} calls were asked for"

        def common(record: dict[str, Any]) -> int:
            pairs = zip(record["text"], call["text"], strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        near = max(left, key=lambda record: (record["kind"] == call["kind"], common(record)))
        if near["text"] == call["text"]:
            then, now = near["asked"], orjson.loads(orjson.dumps(call["asked"], default=str))
            names = sorted({*then, *now})
            others = [n for n in names if then.get(n) != now.get(n)]
            told = ", ".join(f"{n}: {then.get(n)!r} there, {now.get(n)!r} here" for n in others)
            return f"{start}; the nearest differs in {told or 'its kind or media'}"
        at = common(near)
        there, here = near["text"][at : at + _SHOWN], call["text"][at : at + _SHOWN]
        return f"{start}; from character {at} on the nearest has {there!r}, this call {here!r}"

    # ---- what it passes on -----------------------------------------------------------------

    @property
    def num_left(self) -> int:
        """Calls of the file that were not asked for."""
        return len(self._known) - len(self._used)

    def get_model_name(self) -> str:
        return str(self._header["model"])

    @property
    def is_chat_model(self) -> bool:  # type: ignore[override]
        if self._inner is not None:
            return self._inner.is_chat_model
        return bool(self._header.get("is_chat_model"))

    def spec_fill(self, s: StreamExecutor, value: str) -> None:
        raise CassetteError("num_api_spec_tokens of a chat model cannot be recorded: leave it out")

    def cache_prefix(self, prefix_str: str) -> None:
        if self._inner is not None:
            self._inner.cache_prefix(prefix_str)

    def begin_program(self, s: StreamExecutor) -> None:
        if self._inner is not None:
            self._inner.begin_program(s)

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        if self._inner is not None:
            self._inner.end_program(s)

    def flush_cache(self) -> Any:
        return self._inner.flush_cache() if self._inner is not None else None

    def get_server_info(self) -> Any:
        return self._inner.get_server_info() if self._inner is not None else None

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()
