"""The log that says which page lies where in the segment files.

    magic 4 | version 4 | identity 16 | boot id 8          then blocks:  magic 4 | count 4 | crc32 4
                                                           and count entries of 44 bytes
An entry: key 32, segment 4, offset 4 and length 4 in units of 512 bytes. The log is read up to its
first damaged block: what stands behind a torn write is lost, which a cache may be.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from radixlm.tiers.files import Files

UNIT: Final = 512
_HEADER: Final = struct.Struct("<4sI16s8s")
_BLOCK: Final = struct.Struct("<4sII")
_PLACE: Final = struct.Struct("<III")
_ENTRY: Final = np.dtype([("key", "V32"), ("segment", "<u4"), ("offset", "<u4"), ("length", "<u4")])
_MAGIC: Final = b"RLIX"
_BLOCK_MAGIC: Final = b"RLIB"
_VERSION: Final = 1
_READ_BYTES: Final = 1 << 20
_BLOCK_ENTRIES: Final = 4096
_PLACE_BITS: Final = 20  # of offset and of length
MAX_UNITS: Final = 1 << _PLACE_BITS

Place = int
"""Where a frame lies: segment << 40 | offset << 20 | length, the last two in units."""


def place(segment: int, offset: int, num_bytes: int) -> Place:
    """Of a frame at a byte offset, a multiple of UNIT, in a segment."""
    return segment << 2 * _PLACE_BITS | offset // UNIT << _PLACE_BITS | -(-num_bytes // UNIT)


def where(at: Place) -> tuple[int, int, int]:
    """(segment, byte offset, bytes up to the next unit)."""
    mask = MAX_UNITS - 1
    return at >> 2 * _PLACE_BITS, (at >> _PLACE_BITS & mask) * UNIT, (at & mask) * UNIT


class IndexLog:
    """The log of one folder, for its writer or for a process that follows it."""

    def __init__(self, path: Path, identity: bytes, files: Files) -> None:
        self._path, self._files = path, files
        self._identity = identity[:16].ljust(16, b"\0")
        self._fd = -1
        self._inode = 0
        self._end = 0  # of the last block that was read or written
        self.num_entries = 0

    def open(self, *, is_writer: bool) -> bool:
        """Open the log at its start; a writer makes one if there is none, or if it is of another
        identity. False if there is none to follow. OSError."""
        self.close()
        flags = os.O_RDWR | os.O_CREAT if is_writer else os.O_RDONLY
        try:
            self._fd = self._files.open(self._path, flags)
        except FileNotFoundError:
            return False
        self._inode, self._end, self.num_entries = os.fstat(self._fd).st_ino, _HEADER.size, 0
        header = self._files.read(self._fd, _HEADER.size, 0)
        if header[: _HEADER.size - 8] == self._header()[:-8] and len(header) == _HEADER.size:
            return True
        if is_writer:
            os.ftruncate(self._fd, 0)
            self._files.write(self._fd, self._header(), 0)
        return is_writer

    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, self._identity, secrets.token_bytes(8))

    def is_replaced(self) -> bool:
        """Whether the path leads to another file by now, or to none: the writer has made a new log,
        or the folder is gone. OSError."""
        try:
            return os.lstat(self._path).st_ino != self._inode
        except (FileNotFoundError, NotADirectoryError):
            return True

    def new_entries(self) -> Iterator[tuple[list[bytes], list[Place]]]:
        """(keys, places) of the blocks after those that were read, up to the first damaged one."""
        rest, at = b"", self._end
        while data := self._files.read(self._fd, _READ_BYTES, at):
            at += len(data)
            rest += data
            used = 0
            keys: list[bytes] = []
            places: list[Place] = []
            while (block := _block(rest, used)) is not None:
                body, used = block
                _parse(body, keys, places)
            self._end += used
            self.num_entries += len(keys)
            yield keys, places
            rest = rest[used:]
            if _is_damaged(rest):
                return

    def cut(self) -> None:
        """Drop what stands behind the last good block."""
        os.ftruncate(self._fd, self._end)

    def append(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        """Add one block of entries. OSError."""
        data = _blocks(entries)
        self._files.write(self._fd, data, self._end)
        self._end += len(data)
        self.num_entries += len(entries)

    def rewrite(self, entries: Iterable[tuple[bytes, Place]]) -> None:
        """Replace the log by one with only ``entries``. OSError."""
        entries = list(entries)
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        fd = self._files.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        data = self._header() + _blocks(entries)
        try:
            self._files.write(fd, data, 0)
            self._files.sync(fd)
            new.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._inode, self._end = fd, os.fstat(fd).st_ino, len(data)
        self.num_entries = len(entries)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._inode = -1, 0


def _blocks(entries: Sequence[tuple[bytes, Place]]) -> bytes:
    data, mask = bytearray(), MAX_UNITS - 1
    for first in range(0, len(entries), _BLOCK_ENTRIES):
        part = entries[first : first + _BLOCK_ENTRIES]
        body = b"".join(
            key + _PLACE.pack(at >> 2 * _PLACE_BITS, at >> _PLACE_BITS & mask, at & mask)
            for key, at in part
        )
        data += _BLOCK.pack(_BLOCK_MAGIC, len(part), zlib.crc32(body, len(part))) + body
    return bytes(data)


def _is_damaged(rest: bytes) -> bool:
    """Whether what stands behind the last good block will never be one."""
    if len(rest) < _BLOCK.size:
        return not _BLOCK_MAGIC.startswith(rest[:4])
    magic, count, _ = _BLOCK.unpack_from(rest)
    is_whole = len(rest) >= _BLOCK.size + count * _ENTRY.itemsize
    return bool(magic != _BLOCK_MAGIC or count > _BLOCK_ENTRIES or is_whole)


def _block(data: bytes, at: int) -> tuple[memoryview, int] | None:
    """(entries, end) of a block at ``at``; None if it is not whole or damaged."""
    if at + _BLOCK.size > len(data):
        return None
    magic, count, crc = _BLOCK.unpack_from(data, at)
    end = at + _BLOCK.size + count * _ENTRY.itemsize
    if magic != _BLOCK_MAGIC or count > _BLOCK_ENTRIES or end > len(data):
        return None
    body = memoryview(data)[at + _BLOCK.size : end]
    return (body, end) if zlib.crc32(body, count) == crc else None


def _parse(body: memoryview, keys: list[bytes], places: list[Place]) -> None:
    table = np.frombuffer(body, _ENTRY)
    raw = table["key"].tobytes()
    keys += [raw[i : i + 32] for i in range(0, len(raw), 32)]
    segment, offset, length = (table[n].astype(np.uint64) for n in ("segment", "offset", "length"))
    bits = np.uint64(_PLACE_BITS)
    places += (segment << bits + bits | offset << bits | length).tolist()
