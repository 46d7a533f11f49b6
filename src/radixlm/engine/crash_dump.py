"""--crash-dump-folder: the requests of the last five minutes, on disk when an engine is lost.

One JSON object a line: first a header, then one request a line in the order of arrival, with its
prompt, its parameters (the seed that was drawn included) and what had been answered by then. So
``radixlm replay`` can send them again and compare. Nothing in it is code.

The files hold what clients wrote: the folder is made with mode 0700, the files with 0600. At most
``MAX_BYTES`` of ended requests are kept in memory, and ``MAX_FILES`` files in the folder.
"""

import base64
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from radixlm import __version__
from radixlm.base.record import Record
from radixlm.config.server_config import ServerConfig, flat
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest

log = logging.getLogger(__name__)

FORMAT = 1
KEEP_S = 300.0
MAX_BYTES = 64 << 20
MAX_FILES = 16
_PREFIX = "requests-"


class Entry(Record):
    """One request as it stands: ``finish`` is None while it runs."""

    arrival_s: float
    wire: TokenizedRequest
    output_ids: list[int]
    finish: Finish | None
    ended_s: float = 0.0
    num_kills: int = 0

    @property
    def num_bytes(self) -> int:
        embeds = self.wire.embeds
        return len(self.wire.input_ids) + 8 * len(self.output_ids) + len(embeds or b"") + 512


class Recorder(Observer):
    """Remembers requests that have ended, and writes them with those that run."""

    def __init__(
        self,
        folder: Path,
        config: ServerConfig,
        running: Callable[[], Iterable[RequestState]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``running``: the requests that have not ended yet."""
        self._folder, self._config, self._running, self._clock = folder, config, running, clock
        self._ended: deque[Entry] = deque()
        self._num_bytes = 0
        self._num_files = 0
        self._writer: threading.Thread | None = None
        self.last: tuple[float, str] = (0.0, "")  # when the last dump was asked for, its name

    def ended(self, state: RequestState, finish: Finish) -> None:
        entry = _entry(state, finish, self._clock())
        self._ended.append(entry)
        self._num_bytes += entry.num_bytes
        self._forget_old()

    def _forget_old(self) -> None:
        oldest_s = self._clock() - KEEP_S
        while self._ended and (self._ended[0].ended_s < oldest_s or self._num_bytes > MAX_BYTES):
            self._num_bytes -= self._ended.popleft().num_bytes

    def engine_lost(self, reason: str) -> None:
        """Write in the background: streams go on meanwhile. One file at a time."""
        if self._writer is not None and self._writer.is_alive():
            return
        entries = self.entries()
        self._writer = threading.Thread(
            target=self._write_or_say, args=(reason, entries, self._clock()), name="crash dump"
        )
        self._writer.start()

    def wait(self) -> None:
        """Until what is being written is on disk."""
        if self._writer is not None:
            self._writer.join()

    def entries(self) -> list[Entry]:
        """What would be written now, oldest first."""
        self._forget_old()
        running = [_entry(state, None, 0.0) for state in self._running()]
        return sorted([*self._ended, *running], key=lambda entry: entry.arrival_s)

    def _next_path(self) -> Path:
        self._num_files += 1
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        return self._folder / f"{_PREFIX}{stamp}-{os.getpid()}-{self._num_files}.jsonl"

    def _write_or_say(self, reason: str, entries: list[Entry], asked_s: float) -> None:
        try:
            path = self.write(reason, entries)
        except OSError as error:
            log.error("--crash-dump-folder %s: %s", self._folder, error.strerror or error)
        else:
            self.last = (asked_s, path.name)
            log.warning("%d requests of the last minutes are in %s", len(entries), path)

    def write(self, reason: str, entries: list[Entry]) -> Path:
        """A new file with all of them, or OSError and no file, also on a disk that fills up. May
        run in any thread."""
        path = self._next_path()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(".part")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        encode, began = msgspec.json.encode, time.time() - self._clock()
        try:
            with open(descriptor, "wb") as file:
                file.write(encode(self._header(reason, len(entries))) + b"\n")
                for entry in entries:
                    file.write(encode(as_record(entry, began)) + b"\n")
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        for old in sorted(self._folder.glob(f"{_PREFIX}*.jsonl"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return path

    def _header(self, reason: str, count: int) -> dict[str, Any]:
        return {
            "radixlm_requests": FORMAT,
            "version": __version__,
            "reason": reason,
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_requests": count,
            "server_args": flat(self._config),
        }


def _entry(state: RequestState, finish: Finish | None, now_s: float) -> Entry:
    return Entry(
        state.arrival_s, state.wire, list(state.output_ids), finish, now_s, state.crash_count
    )


def as_record(entry: Entry, began: float) -> dict[str, Any]:
    """A line of the file. ``began``: wall time at which the monotonic clock was 0."""
    wire = entry.wire
    record: dict[str, Any] = {
        "rid": wire.rid,
        "received_at": round(began + entry.arrival_s, 3),
        "input_ids": wire.ids().tolist() if wire.embeds is None else None,
        "sampling_params": msgspec.to_builtins(wire.sampling),
        "finish_reason": msgspec.to_builtins(entry.finish) if entry.finish else None,
        "output_ids": entry.output_ids,
    }
    extras = {
        "embeds": base64.b64encode(wire.embeds).decode() if wire.embeds is not None else None,
        "num_embeds": len(wire.input_ids) // 4 if wire.embeds is not None else None,
        "grammar": msgspec.to_builtins(wire.grammar) if wire.grammar else None,
        "logit_processor": wire.processor,
        "max_thinking_tokens": (wire.reasoning_bound or {}).get("thinking_budget"),
        "lora_path": wire.adapter.name if wire.adapter is not None else None,
        "pooling": wire.pooling,
        "cache_salt": wire.cache_salt,
        "extra_key": wire.extra_key,
        "priority": wire.priority or None,
        "streaming_window": wire.streaming.tokens if wire.streaming is not None else None,
        "streaming_sinks": wire.streaming.sinks if wire.streaming is not None else None,
        "num_media": len(wire.media) or None,
        "num_kills": entry.num_kills or None,
    }
    return record | {name: value for name, value in extras.items() if value is not None}
