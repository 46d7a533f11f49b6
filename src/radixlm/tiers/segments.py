"""The disk tier: pages in segment files, which outlive the server.

One thread of low priority compresses and writes, another reads, some expand; the worker waits for
reads with a limit. A disk that is full, fails or is gone takes no pages, and is tried again after
10, 20, 40 ... 60 seconds; those that are there are read all the while. A fault is logged once, and
so is its end.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from pathlib import Path
from typing import Final

from radixlm.tiers.background import LOW_PRIORITY, Background, make_expanders
from radixlm.tiers.base import PageRecord, Payload, TierName
from radixlm.tiers.codec import RAW, Codec
from radixlm.tiers.files import Files
from radixlm.tiers.frame import Fault, Framer
from radixlm.tiers.host import Packed
from radixlm.tiers.segment_store import SEGMENT_BYTES, SegmentStore
from radixlm.tiers.stores.guard import Breaker
from radixlm.wire.transfer import Hint

log = logging.getLogger(__name__)

STALL_S: Final = 2.0  # without a byte from the disk; then nobody waits any more
_AHEAD: Final = 8  # frames that are read ahead of the one that is expanded
_QUEUE_BYTES: Final = 256 << 20
_FOLLOW_S: Final = 1.0
_CLOSE_S: Final = 10.0
_MAX_PAUSE_S: Final = 60.0  # between two trials of a disk that takes no pages
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NAME: Final = re.compile("[0-9a-f]{16}")  # of an identity's folder


class SegmentTier:
    """``folder``: holds a folder for each identity (Manifest.storage_digest). ``on_packed``: called
    with each page that was compressed, so that others need not do it again."""

    name: TierName = "storage"
    medium = "DISK"
    backend = "file"
    takes_puts = has_index = True

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        codec: Codec,
        budget_bytes: int,
        *,
        secret: bytes = b"",
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        min_free_bytes: int = 0,
        stall_s: float = STALL_S,
        on_packed: Callable[[bytes, int, bytes | Payload], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        files = files or Files()
        home = folder / identity.hex()[:16]
        self._store = SegmentStore(
            home, identity, budget_bytes, files, segment_bytes, min_free_bytes
        )
        self._codec, self._framer = codec, Framer(identity, secret, codec)
        self._stall_s, self._on_packed = stall_s, on_packed
        self._off, self._is_closed = "", False  # why no page is written
        self._writes, self._reads = Breaker(clock, 1, _MAX_PAUSE_S), Breaker(clock)
        self._stuck: Future[bytes | None] | None = None  # a read that never came
        self._has_warned = False  # of reads
        self._waiting: dict[bytes, int] = {}  # keys to be written -> bytes
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("written_pages", "dropped_pages", "damaged_pages", "late_reads", "errors"), 0
        )
        self._clock, self._followed_s = clock, clock()
        self._writer = Background("radixlm-tier-write", LOW_PRIORITY)
        self._reader = Background("radixlm-tier-read")
        self._expanders = make_expanders()
        self._writer.submit(lambda: self._guard(self._open, folder, home, budget_bytes))

    # ---- called by the worker ------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        if self._is_stuck() or self._reads.is_open:
            return 0
        index, count = self._store.index, 0
        while count < len(keys) and keys[count] in index:
            count += 1
        if count < len(keys) and self._is_on() and not self._store.is_writer:
            self._follow()
        return count

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        if self._is_closed or self._is_stuck() or not self._reads.allows():
            return 0
        reads: list[Future[bytes | None]] = []
        checks: list[Future[Fault]] = []
        for count, (key, target) in enumerate(zip(keys, out, strict=True)):
            reads += (self._read(key) for key in keys[len(reads) : count + _AHEAD])
            frame = self._frame(key, reads[count])
            if frame is None:
                for late in reads[count:]:
                    late.cancel()
                break
            checks.append(self._expanders.submit(self._framer.unpack, frame, key, target))
        if len(checks) == len(keys):
            self._reads.note(True)
        faults = [bool(check.result()) for check in checks]
        count = faults.index(True) if True in faults else len(faults)
        if count < len(faults):
            self._counts["damaged_pages"] += 1
            self._writer.submit(lambda: self._store.forget(keys[count]))
        self.used(keys[:count])
        return count

    def put(self, records: Sequence[PageRecord]) -> None:
        self.put_packed([Packed(r.key, r.parent, len(r.payload), RAW, r.payload) for r in records])

    def put_packed(self, pages: Sequence[Packed]) -> None:
        """Keep those pages that it lacks: written later, or dropped where too many wait."""
        if not self._is_on():
            return
        if not self._store.is_writer:
            self._follow()
            return
        for page in pages:
            size = len(page.blob)
            with self._lock:
                if page.key in self._store.index or page.key in self._waiting:
                    continue
                if self._waiting_bytes + size > _QUEUE_BYTES:
                    self._counts["dropped_pages"] += 1
                    continue
                self._waiting[page.key] = size
                self._waiting_bytes += size
            self._writer.submit(lambda page=page: self._guard(self._write, page))  # type: ignore[misc]

    def used(self, keys: Sequence[bytes]) -> None:
        if keys and self._is_on():
            self._writer.submit(lambda: self._guard(self._store.used, keys))

    def recent(self, count: int) -> list[bytes]:
        self._writer.drain(self._stall_s)  # the index may not be read yet
        return list(self._store.index)[-count:] if not self._is_stuck() else []

    def clear(self) -> None:
        self._writer.submit(lambda: self._guard(self._store.clear))
        self._writer.drain(_CLOSE_S)

    def stats(self) -> dict[str, float]:
        store = self._store
        return {
            "pages": len(store.index),
            "bytes": sum(store.sizes.copy().values()),
            "segments": len(store.sizes),
            "dropped_segments": store.num_dropped_segments,
            "waiting_bytes": self._waiting_bytes,
            "is_writer": store.is_writer,
            "is_off": bool(self._off),
            **self._counts,
        }

    def close(self) -> None:
        self._writer.drain(_CLOSE_S)
        self._is_closed = True
        self._writer.submit(self._store.close)
        self._writer.close(self._stall_s)
        self._reader.close(self._stall_s)
        self._expanders.shutdown(wait=False)

    def flush(self, limit_s: float = _CLOSE_S) -> bool:
        """Wait until what was put is on disk; False after ``limit_s``."""
        return self._writer.drain(limit_s)

    # ---- reading -------------------------------------------------------------------------------

    def _read(self, key: bytes) -> Future[bytes | None]:
        future: Future[bytes | None] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._store.read(key))
                except OSError as error:
                    future.set_exception(error)

        self._reader.submit(work)
        return future

    def _frame(self, key: bytes, read: Future[bytes | None]) -> bytes | None:
        """What was read, not verified, b"" where there is no such page; None if it did not come
        in time, or not at all."""
        try:
            return read.result(self._stall_s) or b""
        except NotInTime:
            self._counts["late_reads"] += 1
            self._stuck = read
        except OSError as error:
            self._counts["errors"] += 1
            self._reads.note(False)
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s: cannot read a page: %s (more faults are only counted)",
                            self._store.folder, error.strerror or error)  # fmt: skip
            if error.errno == errno.EIO:  # of this place of the disk
                self._writer.submit(lambda: self._store.forget(key))
        return None

    def _is_stuck(self) -> bool:
        """Whether a read that did not come in time is waited for."""
        if self._stuck is not None and self._stuck.done():
            self._stuck = None
        return self._stuck is not None

    # ---- the writer's thread -------------------------------------------------------------------

    def _open(self, folder: Path, home: Path, budget_bytes: int) -> None:
        self._store.open()
        if not self._store.is_writer:
            log.warning("another server writes %s: its pages are read, none is added", home)
            return
        with suppress(OSError):  # their servers may delete files meanwhile
            _drop_others(folder, home, budget_bytes - sum(self._store.sizes.values()))

    def _follow(self) -> None:
        """Ask the writer's thread to look what another server has written, once a second."""
        now_s = self._clock()
        if now_s - self._followed_s >= _FOLLOW_S:
            self._followed_s = now_s
            self._writer.submit(lambda: self._guard(self._catch_up))

    def _catch_up(self) -> None:
        if self._store.become_writer():
            log.info("%s: the server that wrote here has ended", self._store.folder)
            self._store.open()
        else:
            self._store.follow()

    def _write(self, page: Packed) -> None:
        try:
            if self._off:
                return
            flags, blob = page.flags, page.blob
            if flags == RAW and not isinstance(blob, bytes):
                flags, blob = self._codec.encode(blob)
                if self._on_packed is not None and flags != RAW:
                    self._on_packed(page.key, flags, blob)
            frame = self._framer.seal(page.key, page.parent, page.raw_bytes, flags, blob)
            try:
                self._store.append(page.key, frame)
            except OSError as error:  # a disk that others fill: give back room, once
                if error.errno not in _FULL or len(self._store.sizes) < 2:
                    raise
                self._store.drop_oldest()
                self._store.append(page.key, frame)
            self._counts["written_pages"] += 1
        finally:
            with self._lock:
                self._waiting_bytes -= self._waiting.pop(page.key, 0)
        if not self._waiting or len(self._store.unlogged) >= 64:
            self._store.flush()

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        """Run work on files; after a fault no pages are written."""
        try:
            work(*args)
        except OSError as error:
            self._counts["errors"] += 1
            with suppress(OSError):  # what was written so far
                self._store.flush()
            self._store.forget_lost()
            if not self._off:
                self._off = error.strerror or str(error)
                self._writes.note(False)
                log.warning("%s: %s; pages are no longer kept there", self._store.folder, self._off)

    def _is_on(self) -> bool:
        """Whether pages are written; if not, from time to time the writer's thread tries again."""
        if self._off and not self._is_closed and self._writes.allows():
            self._writer.submit(self._try_again)
        return not self._off and not self._is_closed

    def _try_again(self) -> None:
        try:
            self._store.reopen()
        except OSError:
            self._writes.note(False)
            return
        self._writes.note(True)
        self._off = ""
        log.info("%s: pages are kept there again", self._store.folder)


def _drop_others(folder: Path, home: Path, num_bytes: int) -> None:
    """Delete folders of other models and versions, the oldest first, until they are within
    ``num_bytes``; not those that another server has locked."""
    others = [
        path
        for path in folder.iterdir()
        if path != home
        and _NAME.fullmatch(path.name)
        and not path.is_symlink()
        and (path / "index.log").is_file()
    ]
    sizes = {path: sum(f.stat().st_size for f in path.iterdir()) for path in others}
    for path in sorted(others, key=lambda path: (path / "index.log").stat().st_mtime):
        if sum(sizes.values()) <= num_bytes:
            return
        store = SegmentStore(path, b"", 0, Files())
        if store.become_writer():
            store.close()
            with suppress(OSError):
                shutil.rmtree(path)
            del sizes[path]
