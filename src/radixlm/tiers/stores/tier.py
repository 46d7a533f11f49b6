"""StoreTier: a tier over a store that may be slow, down, wrong or hostile."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeVar

import numpy as np

from radixlm.base.errors import TransferError
from radixlm.tiers.base import PageRecord, Payload, TierName
from radixlm.tiers.frame import Framer
from radixlm.tiers.stores.base import Store, StoreOptions
from radixlm.tiers.stores.grid import Cell, Grid, batches
from radixlm.tiers.stores.guard import Breaker, Lane, StillBusy
from radixlm.wire.transfer import Hint

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOKUP_PAGES: Final = 128
BATCH_BYTES: Final = 16 << 20
BYTES_PER_S: Final = 50e6  # a store slower than this is as good as down
CLEAR_DEADLINE_S: Final = 60.0
CLOSE_S: Final = 5.0
MAX_BAD: Final = 4096  # names of wrong objects that are remembered
COUNTS: Final = (
    *(f"{w}_pages" for w in "lookup hit missed put dropped short foreign damaged".split()),
    *"get_bytes put_bytes errors timeouts busy_calls refused_calls".split(),
)
_NICENESS: Final = 10


class StoreTier:
    """Pages as frames in ``store``, an object for each cell of ``grid``."""

    name: TierName = "storage"
    takes_puts, has_index = True, False

    def __init__(
        self,
        store: Store,
        backend: str,
        grid: Grid,
        secret: bytes = b"",
        options: StoreOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend, self.medium = backend, store.medium
        self._store, self._grid, self._options = store, grid, options or StoreOptions()
        self._framers = {
            name: Framer(hashlib.sha256(grid.digest + name.encode()).digest(), secret)
            for name in grid.names
        }
        self._lanes = {kind: Lane(f"store {kind}") for kind in ("lookup", "get", "put")}
        self.breaker = Breaker(clock)
        self._is_open, self._open_lock = False, threading.Lock()
        self._bad: dict[str, None] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._logged: set[str] = set()
        self._queue: deque[PageRecord] = deque()
        self._queued_bytes, self._is_writing, self._is_closed = 0, False, False
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        found, end_s = 0, time.monotonic() + self._options.lookup_deadline_s
        for start in range(0, len(keys), LOOKUP_PAGES):
            pages = [self._names(key) for key in keys[start : start + LOOKUP_PAGES]]
            names = [name for page in pages for name in page]
            work = partial(_answers, "exists", names)
            there = self._call("lookup", work, end_s - time.monotonic())
            if there is None:
                break
            is_there = {n for n, has in zip(names, there, strict=True) if has} - self._bad.keys()
            num_leading = sum(1 for _ in takewhile(is_there.issuperset, pages))
            found += num_leading
            if num_leading < len(pages):
                break
        self._counts["lookup_pages"] += found
        return found

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        done = 0
        for start, end in batches([len(page) for page in out], BATCH_BYTES):
            num_good = self._get(keys[start:end], out[start:end])
            done += num_good
            if num_good < end - start:
                break
        self._counts["hit_pages"] += done
        self._counts["missed_pages"] += len(keys) - done
        return done

    def _get(self, keys: Sequence[bytes], out: Sequence[Payload]) -> int:
        pages = list(takewhile(lambda page: self._grid.is_page(len(page)), out))
        cells = [(n, cell) for n, page in enumerate(pages) for cell in self._grid.cells(len(page))]
        names = [self._name(keys[n], cell) for n, cell in cells]
        # the call's own buffers: one that is left behind may write into them later
        frames = [np.empty(Framer.max_bytes(cell.num_bytes), np.uint8) for _, cell in cells]
        views = [memoryview(frame) for frame in frames]  # type: ignore[arg-type]
        num_bytes = sum(map(len, frames))
        deadline_s = self._options.deadline_s + num_bytes / BYTES_PER_S
        work = partial(_answers, "get", names, views)
        lengths: list[int] | None = self._call("get", work, deadline_s)
        for (n, cell), name, frame, length in zip(
            cells, names, frames, lengths or [-1] * len(cells), strict=True
        ):
            whole = pages[n] if not cell.boxes else np.empty(cell.num_bytes, np.uint8)
            if length < 0 or not self._is_good(name, cell.name, frame[:length], keys[n], whole):
                return n
            cell.paste(whole, pages[n])
            self._counts["get_bytes"] += length
        return len(pages)

    def put(self, records: Sequence[PageRecord]) -> None:
        with self._changed:
            if self._writer is None and not self._is_closed:
                self._writer = threading.Thread(target=self._write, name="store put", daemon=True)
                self._writer.start()
            for record in records:
                size = record.payload.nbytes
                if (
                    self._is_closed
                    or self._queued_bytes + size > self._options.put_queue_mb * 2**20
                ):
                    self._counts["dropped_pages"] += 1
                    continue
                self._queued_bytes += size
                self._queue.append(record)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._queue.clear()
            self._queued_bytes = 0
        self._bad.clear()
        self._call("get", lambda s: s.clear(), CLEAR_DEADLINE_S)

    def flush(self, limit_s: float) -> bool:
        """Wait until nothing waits to be written; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._is_writing), limit_s)

    def stats(self) -> dict[str, float]:
        own = {name: float(count) for name, count in self._counts.items()}
        own |= {"queued_bytes": float(self._queued_bytes), "is_open": float(self._is_open)}
        own["breaker_open"] = float(self.breaker.is_open)
        with suppress(Exception):  # of a library: figures may be missing
            own |= {f"store_{name}": value for name, value in self._store.stats().items()}
        return own

    def close(self) -> None:
        if not self.breaker.is_open:
            self.flush(CLOSE_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(CLOSE_S)
        if self._is_open:
            with suppress(Exception):
                self._lanes["get"].call(self._store.close, CLOSE_S)
        for lane in self._lanes.values():
            lane.close(CLOSE_S)

    # ---- writing ---------------------------------------------------------------------------------

    def _write(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closed, 1.0)
                if self._is_closed and not self._queue:
                    return
                records, size = [], 0
                while self._queue and size < BATCH_BYTES:
                    records.append(self._queue.popleft())
                    size += records[-1].payload.nbytes
                self._queued_bytes -= size
                self._is_writing = bool(records)
            if records:
                self._put(records)

    def _put(self, records: Sequence[PageRecord]) -> None:
        cells = [
            (record, cell) for record in records for cell in self._grid.cells(len(record.payload))
        ]
        names = [self._name(record.key, cell) for record, cell in cells]
        there = self._call("put", partial(_answers, "exists", names), self._options.deadline_s)
        if there is None:
            self._counts["dropped_pages"] += len(records)
            return
        wrong = [name for name in names if name in self._bad]
        new = {
            name: self._framers[cell.name].pack(
                record.key, cell.copy(record.payload), record.parent
            )
            for name, (record, cell), is_there in zip(names, cells, there, strict=True)
            if not is_there or name in self._bad
        }
        num_bytes = sum(map(len, new.values()))

        def work(store: Store) -> bool:
            if wrong:
                store.delete(wrong)
            store.put(list(new), list(new.values()))
            return True

        deadline_s = self._options.deadline_s + num_bytes / BYTES_PER_S
        if new and self._call("put", work, deadline_s) is None:
            self._counts["dropped_pages"] += len(records)
            return
        for name in wrong:
            self._bad.pop(name, None)
        self._counts["put_pages"] += len(records)
        self._counts["put_bytes"] += num_bytes

    def _names(self, key: bytes) -> list[str]:
        """The objects of a page."""
        return [f"{key.hex()[:32]}_{name}" for name in self._grid.names]

    def _name(self, key: bytes, cell: Cell) -> str:
        return f"{key.hex()[:32]}_{cell.name}"

    # ---- calls -----------------------------------------------------------------------------------

    def _call(self, kind: str, work: Callable[[Store], T], deadline_s: float) -> T | None:
        """What the store says, None if it does not in time."""
        if deadline_s <= 0 or not self.breaker.allows():
            self._counts["refused_calls"] += 1
            return None

        def opened() -> T:
            with self._open_lock:
                if not self._is_open:
                    self._store.open()
                    self._is_open = True
            return work(self._store)

        try:
            result = self._lanes[kind].call(opened, deadline_s)
        except StillBusy:
            self._counts["busy_calls"] += 1
            return None
        except Exception as error:  # a library may raise anything: all of it is a miss
            fault = "timeouts" if isinstance(error, TimeoutError) else "errors"
            self._counts[fault] += 1
            self.breaker.note(False)
            self._log_once(type(error).__name__, f"{kind}: {error or 'no answer in time'}")
            return None
        self.breaker.note(True)
        return result

    def _is_good(self, name: str, cell: str, frame: Payload, key: bytes, out: Payload) -> bool:
        fault = self._framers[cell].unpack(frame, key, out)
        if fault:
            self._counts[f"{fault}_pages"] += 1
            self._log_once(fault, f"an object is {fault}: {name}")
            while len(self._bad) >= MAX_BAD:
                self._bad.pop(next(iter(self._bad)), None)
            self._bad[name] = None  # replaced when its page is computed and written again
        return not fault

    def _log_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("storage %s: %s (further ones are counted only)", self.backend, message)


def _answers(method: str, names: Sequence[str], *more: Any) -> list[Any]:
    """What a method of the last argument, a store, says of each name; TransferError if it says
    another number of things."""
    *arguments, store = more
    answers = list(getattr(store, method)(names, *arguments))
    if len(answers) != len(names):
        raise TransferError(f"{method}: {len(answers)} answers for {len(names)} objects")
    return answers
