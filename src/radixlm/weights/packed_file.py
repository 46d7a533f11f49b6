"""The file of packed weights: a page of facts, the numbers, and a table of what lies where.

    0      magic, format, size of the file, place and SHA-256 of the table (``_Head``)
    4096   tensors as the kernels read them, each at a multiple of 64 bytes, large ones of 4096
    end    the table (MessagePack): layers, what they hold, a sum for each MiB

The table comes last, so that a file is written in one pass. A file is whole or it is refused: its
size and the table's digest are checked when it is opened, and ``check`` adds up all numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from radixlm.base.record import Record

MAGIC: Final = b"RadixPak"
# of this file and of what the kernels read. To be raised with every change of csrc/cpu/pack.cpp,
# of PackedLinear's memory or of the records below; tests/weights/test_packed_cache.py holds a
# digest of what is packed that tells when.
VERSION: Final = 1
PAGE: Final = 4096
CHUNK_BYTES: Final = 1 << 20
_HEAD = struct.Struct("<8sIIQQQ32s")  # magic, version, 0, file size, table at, table bytes, digest
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32,
              torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which ``DTYPES`` has it."""
    return str(dtype).removeprefix("torch.")


class PackedFileError(Exception):
    """The file is damaged, or of another version."""


class Place(Record, array_like=True):
    """Where a tensor lies: bytes from the beginning of the file, shape, dtype."""

    at: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype].itemsize


class Pack(Record, array_like=True):
    """One ``PackedLinear``: what it is made with, and its memory by the names of ``Buffers``."""

    num_out: int
    num_in: int
    fmt: str
    is_paired: bool
    zero_points: str | None
    buffers: dict[str, Place]


class Note(Record, array_like=True):
    """A ``KernelWeight`` without its numbers."""

    shape: tuple[int, ...]
    dtype: str
    fmt: str
    scale_shape: tuple[int, ...]
    has_offset: bool
    index: Place | None


class LayerEntry(Record, array_like=True):
    """One layer. ``dtypes``: of its parameters, "" of those that stay integers. ``kept``: those
    whose values it keeps."""

    dtypes: dict[str, str]
    kept: dict[str, Place]
    packs: list[Pack]
    notes: list[Note]


class Table(Record):
    """``sums``: of each MiB of the numbers, as words of 64 bits."""

    facts: dict[str, Any]
    layers: dict[str, LayerEntry]
    sums: list[int]


class UnfitModelError(PackedFileError):
    """The file is whole, but a layer cannot be made from it."""


def chunk_sum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """The sum of the 64 bit words of some bytes (a multiple of 8), modulo 2 ** 64. Any one changed
    bit changes it."""
    return int(np.add.reduce(data.view(np.uint64), dtype=np.uint64))


class FileWriter:
    """Writes a file beside ``path`` and puts it in its place when it is finished, in one step."""

    def __init__(self, path: Path) -> None:
        """OSError if there is no room or no right to write."""
        self.path = path
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.descriptor = os.open(self._part, flags, 0o600)
        self._at, self._left = PAGE, bytearray()
        self._sums: list[int] = []
        self._written = PAGE

    def add(self, tensor: Tensor) -> Place:
        """Write a contiguous tensor of the CPU."""
        data: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        self._pad(PAGE if data.nbytes >= PAGE else 64)
        place = Place(self._at, tuple(tensor.shape), dtype_name(tensor.dtype))
        self._put(data.data)
        return place

    def _pad(self, align: int) -> None:
        if gap := -self._at % align:
            self._put(memoryview(bytes(gap)))

    def _put(self, data: memoryview) -> None:
        """Append bytes; whole chunks are written and added up."""
        self._at += len(data)
        while data:
            if not self._left and len(data) >= CHUNK_BYTES:
                self._write(data[:CHUNK_BYTES])
                data = data[CHUNK_BYTES:]
                continue
            take = CHUNK_BYTES - len(self._left)
            self._left += data[:take]
            data = data[take:]
            if len(self._left) == CHUNK_BYTES:
                self.flush()

    def sync(self) -> None:
        """Let all that was added be read by whoever maps the file."""
        self._write_at(self._left, self._written)

    def flush(self) -> None:
        """Write what is left of a chunk, padded to whole words."""
        self._left += bytes(-len(self._left) % 8)
        if self._left:
            self._write(memoryview(bytes(self._left)))
        self._left = bytearray()

    def _write(self, data: memoryview) -> None:
        self._sums.append(chunk_sum(np.frombuffer(data, np.uint8)))
        self._write_at(data, self._written)
        self._written += len(data)

    def _write_at(self, data: memoryview | bytes | bytearray, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count

    def finish(self, facts: dict[str, Any], layers: dict[str, LayerEntry]) -> None:
        """Write the table, flush all of it to the disk, and give the file its name."""
        self.flush()
        table = msgspec.msgpack.encode(Table(facts, layers, self._sums))
        self._write_at(table, self._written)
        size = self._written + len(table)
        digest = hashlib.sha256(table).digest()
        head = _HEAD.pack(MAGIC, VERSION, 0, size, self._written, len(table), digest)
        self._write_at(head.ljust(PAGE, b"\0"), 0)
        os.ftruncate(self.descriptor, size)
        os.fsync(self.descriptor)
        os.replace(self._part, self.path)
        self.close()

    def close(self) -> None:
        """Give up what is not finished."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            with contextlib.suppress(FileNotFoundError):
                self._part.unlink()


class MappedFile:
    """A mapped file: pages are read when they are touched, and shared by all processes until
    somebody writes to them, who then has a copy of his own."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        kind = mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = mmap.mmap(descriptor, num_bytes, flags=flags, prot=kind)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.address, self.data_end = int(self.bytes.ctypes.data), num_bytes

    def tensor(self, place: Place) -> Tensor:
        if place.at + place.num_bytes > self.data_end:
            raise PackedFileError("a tensor lies past its end")
        dtype = DTYPES[place.dtype]
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=dtype)
        count = place.num_bytes // dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place.at)
        return flat.view(place.shape)


class PackedFile(MappedFile):
    """A finished file, mapped."""

    def __init__(self, path: Path) -> None:
        """FileNotFoundError if there is none, PackedFileError if it is not whole."""
        self.path = path
        with path.open("rb") as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[:8] != MAGIC:
                raise PackedFileError("it is no file of packed weights")
            _, version, _, size, at, table_bytes, digest = _HEAD.unpack(head)
            if version != VERSION:
                raise PackedFileError(f"it is of version {version}, not {VERSION}")
            if size != self.num_bytes or at + table_bytes != size:
                raise PackedFileError(f"it has {self.num_bytes} bytes, not {size}")
            file.seek(at)
            table = file.read(table_bytes)
            if hashlib.sha256(table).digest() != digest:
                raise PackedFileError("its table is damaged")
            self.table = msgspec.msgpack.decode(table, type=Table)
            super().__init__(file.fileno(), size)
        self.data_end = at

    def check(self, num_threads: int = 2) -> None:
        """Read all numbers and add them up. PackedFileError if they are not those written."""
        starts = range(PAGE, self.data_end, CHUNK_BYTES)
        if len(starts) != len(self.table.sums):
            raise PackedFileError("it lacks sums")

        def first_bad(begin: int) -> int | None:
            for number in range(begin, len(starts), num_threads):
                start = starts[number]
                part = self.bytes[start : min(start + CHUNK_BYTES, self.data_end)]
                if chunk_sum(part) != self.table.sums[number]:
                    return start
            return None

        with ThreadPoolExecutor(num_threads) as pool:
            bad = [at for at in pool.map(first_bad, range(num_threads)) if at is not None]
        if bad:
            raise PackedFileError(f"the numbers at byte {min(bad)} are damaged")
