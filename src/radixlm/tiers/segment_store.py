"""Segment files and their index, as synchronous operations on one folder.

    seg-00000001.kv    512 bytes of header, then frames (``frame.py``) at multiples of 512 bytes
    index.log          which key lies where
    lock               flock of the one process that writes; others read and follow the log

Frames are written before their entry in the log, and the log is written in whole blocks: whatever a
crash leaves behind, an entry leads to a whole frame or to one whose digest is wrong. Over its
budget the store drops its oldest segment; frames of it that were read since they were written are
moved to the newest one first.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from radixlm.base.private_files import make_private_folder, try_lock
from radixlm.tiers.files import Files
from radixlm.tiers.index_log import MAX_UNITS, UNIT, IndexLog, Place, place, where

SEGMENT_BYTES: Final = 64 << 20
_HEADER: Final = struct.Struct("<4sI16sQ")
_MAGIC: Final = b"RLSG"
_VERSION: Final = 1
_NAME: Final = re.compile(r"seg-(\d{8})\.kv")
_MAX_OPEN: Final = 64
_MOVED: Final = 0.5  # of a dropped segment's frames, at most
_SLACK: Final = 1024  # dead entries that a log may have in any case
_USED_EVERY: Final = 256  # entries between two of a key that is used all the time


class SegmentStore:
    """``folder``: of one identity. ``min_free_bytes`` of the disk stay free. Only ``read`` may be
    called beside another call, by one thread."""

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        budget_bytes: int,
        files: Files,
        segment_bytes: int = SEGMENT_BYTES,
        min_free_bytes: int = 0,
    ) -> None:
        self.folder, self._files = folder, files
        self._identity = identity[:16].ljust(16, b"\0")
        self._budget_bytes, self._min_free_bytes = budget_bytes, min_free_bytes
        self._segment_bytes = max(UNIT * 2, min(segment_bytes, budget_bytes // 8, UNIT * MAX_UNITS))
        self._log = IndexLog(folder / "index.log", identity, files)
        self._lock_fd = self._fd = -1
        self._number = self._end = 0  # of the segment that is written, and its length so far
        self.unlogged: list[tuple[bytes, Place]] = []
        self._readers: OrderedDict[int, int] = OrderedDict()  # segment -> descriptor
        self._gone: list[
            int
        ] = []  # segments whose reader is to be closed, by the thread that reads
        self.index: dict[bytes, Place] = {}
        self.sizes: dict[int, int] = {}  # bytes of each segment
        # keys used since they were written -> entries of the log before their last one
        self.hot: dict[bytes, int] = {}
        self._num_logged = 0
        self.is_writer = self._is_moving = False
        self.num_dropped_segments = 0

    # ---- opening -------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, or follow its owner; read the log, also of a disk that cannot be written.
        OSError."""
        make_private_folder(self.folder)
        try:
            self.become_writer()
        finally:
            self.follow()
        if self.is_writer:
            self._log.cut()

    def reopen(self) -> None:
        """After a fault: go on in a new segment, and in a new folder if this one is gone. OSError
        where that fails, or a segment has no room."""
        if not self.is_writer or self._log.is_replaced():
            self._leave()
            self.open()
        if self.is_writer:
            needed = self._segment_bytes + self._min_free_bytes
            if self._files.free_bytes(self.folder) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._new_segment(0)

    def become_writer(self) -> bool:
        """Try to take the lock, and the log with it."""
        if not self.is_writer:
            fd = self._files.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            try:
                self.is_writer = try_lock(fd)
            finally:
                if not self.is_writer:
                    os.close(fd)
            if self.is_writer:
                self._lock_fd = fd
                self.index.clear()
                self._log.close()
        return self.is_writer

    def follow(self) -> None:
        """Read what the log has got since the last time, and forget segments that are gone."""
        if is_new := self._log.is_replaced():
            self.index.clear()
            if not self._log.open(is_writer=self.is_writer):
                return
        before, self.sizes = self.sizes, self._list_segments()
        for keys, places in self._log.new_entries():
            self._learn(zip(keys, places, strict=True))
        if is_new or before.keys() - self.sizes.keys():
            gone = [k for k, at in self.index.items() if where(at)[0] not in self.sizes]
            self.forget(*gone)

    def _list_segments(self) -> dict[int, int]:
        found = {}
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_file() and not path.is_symlink():
                with suppress(FileNotFoundError):  # the writer has just dropped it
                    found[int(match[1])] = path.stat().st_size
        return found

    def forget(self, *keys: bytes) -> None:
        """Keys whose frames are gone or damaged."""
        for key in keys:
            self.index.pop(key, None)
            self.hot.pop(key, None)

    def forget_lost(self) -> None:
        """Forget all keys if the folder is gone."""
        with suppress(OSError):
            if self._log.is_replaced():
                self.index.clear()

    # ---- reading -------------------------------------------------------------------------------

    def read(self, key: bytes) -> bytes | None:
        """The frame of a key and up to 511 bytes behind it, not verified. OSError."""
        at = self.index.get(key)
        if at is None:
            return None
        while self._gone:
            if (gone := self._readers.pop(self._gone.pop(), -1)) >= 0:
                os.close(gone)
        number, offset, num_bytes = where(at)
        fd = self._reader(number)
        return None if fd is None else self._files.read(fd, num_bytes, offset)

    def _reader(self, number: int) -> int | None:
        """A descriptor of a segment; None if it is not one of this identity."""
        fd = self._readers.get(number, -1)
        if fd >= 0:
            self._readers.move_to_end(number)
            return fd
        opened = self._open_segment(number)
        if opened is None:
            return None
        self._readers[number] = opened
        if len(self._readers) > _MAX_OPEN:
            os.close(self._readers.popitem(last=False)[1])
        return opened

    def _open_segment(self, number: int) -> int | None:
        try:
            fd = self._files.open(self._path(number), os.O_RDONLY)
        except FileNotFoundError:
            return None  # dropped by the writer
        is_own = False
        try:
            is_own = self._files.read(fd, _HEADER.size, 0) == self._header(number)
        finally:
            if not is_own:
                os.close(fd)
        return fd if is_own else None

    def _path(self, number: int) -> Path:
        return self.folder / f"seg-{number:08}.kv"

    def _header(self, number: int) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, self._identity, number)

    # ---- writing -------------------------------------------------------------------------------

    def append(self, key: bytes, frame: bytes) -> None:
        """Write a frame; its key is known after the next ``flush``. OSError, after which the store
        is as before."""
        size = -(-len(frame) // UNIT) * UNIT
        if UNIT + size > min(self._budget_bytes, UNIT * MAX_UNITS):
            return
        if self._fd < 0 or self._end + size > max(self._segment_bytes, UNIT + size):
            self._new_segment(size)
        self._files.write(self._fd, frame, self._end)
        self.unlogged.append((key, place(self._number, self._end, len(frame))))
        self._end += size
        self.sizes[self._number] = self._end

    def flush(self) -> None:
        """Write the log of what was appended. OSError: it is known to this process only."""
        if not self.is_writer:
            return
        entries, self.unlogged = self.unlogged, []
        if entries:
            if self._log.is_replaced():
                raise FileNotFoundError(errno.ENOENT, "the folder was deleted")
            self._learn(entries)
            self._log.append(entries)
            self._num_logged += len(entries)
        if self._log.num_entries > 2 * len(self.index) + _SLACK:
            self._log.rewrite(self.index.items())

    def _learn(self, entries: Iterable[tuple[bytes, Place]]) -> None:
        """The index is in the order of the log: what was used last stands at the end."""
        for key, at in entries:
            self.index.pop(key, None)
            self.index[key] = at

    def used(self, keys: Sequence[bytes]) -> None:
        """Keys of pages that were used: they are kept when their segment is dropped, and entered
        into the log again, at its end. OSError."""
        now = self._num_logged
        due = [
            key
            for key in keys
            if key in self.index and now - self.hot.get(key, -_USED_EVERY) >= _USED_EVERY
        ]
        if due and self.is_writer:
            self.hot.update(dict.fromkeys(due, now))
            self.unlogged += [(key, self.index[key]) for key in due]
            self.flush()

    def _new_segment(self, size: int) -> None:
        self._seal()
        self._make_room(max(self._segment_bytes, UNIT + size))
        if self._fd >= 0:  # what was moved has begun one
            return
        self._number = max(self._number, *self.sizes, 0) + 1
        while os.path.lexists(self._path(self._number)):  # something foreign
            self._number += 1
        fd = self._files.open(self._path(self._number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._files.write(fd, self._header(self._number), 0)
        except OSError:
            os.close(fd)
            self._path(self._number).unlink(missing_ok=True)
            raise
        self._fd, self._end, self.sizes[self._number] = fd, UNIT, UNIT

    def _seal(self) -> None:
        """End the segment that is written."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # unwritten frames are misses
                self._files.sync(fd)
            os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Drop oldest segments until ``num_bytes`` more fit into the budget and onto the disk."""
        while self.sizes:
            is_within = sum(self.sizes.values()) + num_bytes <= self._budget_bytes
            free = self._files.free_bytes(self.folder)
            if is_within and free >= num_bytes + self._min_free_bytes:
                return
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Delete the oldest segment, but keep a part of what was read of it."""
        number = min(self.sizes)
        if number == self._number:
            self._seal()
        # a full disk has no room for their entries in the log
        self.unlogged = [(key, at) for key, at in self.unlogged if where(at)[0] != number]
        keys = [key for key, at in self.index.items() if where(at)[0] == number]
        # what moves may need room, too: then others are dropped whole
        hot = [] if self._is_moving else [key for key in keys if key in self.hot]
        kept = self._hot_frames(number, hot, len(keys))
        self._delete(number)
        self.forget(*keys)
        if kept:
            self._is_moving = True
            try:
                for key, frame in kept:
                    self.append(key, frame)
            finally:
                self._is_moving = False

    def _hot_frames(
        self, number: int, keys: list[bytes], num_keys: int
    ) -> list[tuple[bytes, bytes]]:
        """Of a segment with ``num_keys`` frames, those of ``keys``, up to a share of all."""
        keys = keys[: int(_MOVED * num_keys)]
        fd = self._open_segment(number) if keys else None
        if fd is None:
            return []
        try:
            places = [where(self.index[key]) for key in keys]
            return [
                (key, self._files.read(fd, num_bytes, offset))
                for key, (_, offset, num_bytes) in zip(keys, places, strict=True)
            ]
        finally:
            os.close(fd)

    def _delete(self, number: int) -> None:
        self.sizes.pop(number, None)
        self._gone.append(number)
        self._files.remove(self._path(number))
        self.num_dropped_segments += 1

    # ---- all of it -----------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete all segments; a follower forgets them only."""
        self._seal()
        self.index.clear()
        self.hot.clear()
        self.unlogged.clear()
        if self.is_writer:
            for number in list(self.sizes):
                self._delete(number)
            self._log.rewrite(())

    def _leave(self) -> None:
        """Give up the folder; its segments are closed by the thread that reads."""
        with suppress(OSError):
            self.flush()
        self._seal()
        self._log.close()
        self._gone += list(self._readers)
        self.hot.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd, self.is_writer = -1, False

    def close(self) -> None:
        self._leave()
        for fd in self._readers.values():
            os.close(fd)
        self._readers.clear()
