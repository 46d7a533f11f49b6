"""StepRing: one fixed record for each step, in memory that the engine and the HTTP process map.

The engine writes, anybody reads: no lock, no message. A record has its number at both ends, written
one after the other, so a reader knows one that is being written, or was torn by a kill, and skips
it. The memory is a file of the server's run folder: a new engine goes on in it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FILE: Final = "steps"
NUM_RECORDS: Final = 4096
_MAGIC: Final = b"RDXSTEP1"
# seconds of the monotonic clock, then the phases (in memory in seconds), then counts
TIMES: Final = ("plan_ms", "prepare_ms", "model_ms", "sample_ms", "commit_ms", "wait_ms")
COUNTS: Final = (
    *("decodes", "prefill_tokens", "forced", "accepted", "budget"),
    *("free_pages", "retracted", "evicted"),
)
FIELDS: Final = ("start_s", *TIMES, *COUNTS)
# its number, the fields, its number again: 80 bytes
_RECORD: Final = struct.Struct(f"=qd{len(TIMES)}f{len(COUNTS)}Iq")
_HEAD: Final = struct.Struct("=8sq48x")  # magic, number of the next record
_NEXT: Final = 1  # its place in int64s
_pack: Final = _RECORD.pack_into
NUM_BYTES: Final = _HEAD.size + NUM_RECORDS * _RECORD.size
_FIRST: Final = _HEAD.size
_SIZE: Final = _RECORD.size
_NUM_TIMES: Final = len(TIMES)
MAX_COUNT: Final = (1 << 32) - 1

Record = tuple[float, ...]
"""(number, start_s, phases in ms ..., counts ...)."""


class StepRing:
    """The ring over a writable ``buffer`` of ``NUM_BYTES``; one writer, any number of readers.

    Records are numbered from 0 on, for as long as the memory lives."""

    def __init__(self, buffer: bytearray | mmap.mmap | None = None) -> None:
        """``buffer``: zeros, or what another ring has left. By default memory of this process."""
        self._buffer = bytearray(NUM_BYTES) if buffer is None else buffer
        self._words = memoryview(self._buffer).cast("q")
        magic, self._next = _HEAD.unpack_from(self._buffer)
        if magic != _MAGIC or self._next < 0:
            self._next = 0
            self._buffer[:] = bytes(NUM_BYTES)
            _HEAD.pack_into(self._buffer, 0, _MAGIC, 0)

    @staticmethod
    def open(folder: Path) -> StepRing:
        """The ring of a run folder, made where it is not there; OSError if it cannot be mapped."""
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # a write to a hole of a full disk is a SIGBUS
                os.posix_fallocate(descriptor, 0, NUM_BYTES)
            else:
                os.ftruncate(descriptor, NUM_BYTES)
            return StepRing(mmap.mmap(descriptor, NUM_BYTES))
        finally:
            os.close(descriptor)

    @staticmethod
    def find(folder: Path) -> StepRing | None:
        """The ring of a run folder, to read only; None where no engine has made one."""
        try:
            descriptor = os.open(folder / FILE, os.O_RDONLY)
        except OSError:
            return None
        try:
            found = mmap.mmap(descriptor, NUM_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it is being made
            return None
        finally:
            os.close(descriptor)
        return StepRing(found) if found[: len(_MAGIC)] == _MAGIC else None

    @property
    def end(self) -> int:
        """The number of the next record."""
        return self._words[_NEXT]

    def write(self, *fields: float) -> None:
        """Append a record of FIELDS, the times in seconds; counts are below 2^32."""
        at = _FIRST + self._next % NUM_RECORDS * _SIZE
        self._next = number = self._next + 1
        # the number at the end is of the old record until all before it is written
        _pack(self._buffer, at, number, *fields, number)
        self._words[_NEXT] = number

    def read(self, first: int) -> Iterator[Record]:
        """The whole records from number ``first`` on, oldest first; those that are overwritten or
        torn are left out."""
        end = self.end
        for number in range(max(first, end - NUM_RECORDS, 0), end):
            at = _FIRST + number % NUM_RECORDS * _SIZE
            begin, start_s, *fields, close = _RECORD.unpack_from(self._buffer, at)
            # the writer may be at the oldest one while this reads it
            if begin == close == number + 1 and number > self.end - NUM_RECORDS:
                times = (1e3 * one for one in fields[:_NUM_TIMES])
                yield (number, start_s, *times, *fields[_NUM_TIMES:])
