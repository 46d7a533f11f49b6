"""Memory of the pools: the engine's own, or a memfd of the server that outlives the engine.

A kept memory is laid out by the order of the calls of ``take``, which is the same in each engine
of one server; the numbers that decide on sizes are read back from its header.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HEADER: Final = struct.Struct("<8s32sQ16q")  # magic, identity, bytes, numbers
_CHECKSUM: Final = struct.Struct("<I")
_MAGIC: Final = b"RLKEPT01"
_ALIGN: Final = 2 << 20
_MAX_NUMBERS: Final = 16
_TABLE_AT: Final = 4096  # in the header's block


class KeptTensor(NamedTuple):
    """A tensor of a pool in a kept memory: uint8 [layers, pages, row_bytes] from byte ``start``."""

    space: int
    start: int
    layers: int
    pages: int
    row_bytes: int


_lender = threading.local()  # ``memory``: where this thread makes pools


class KeptMemory:
    """The memory at ``path``, for an engine of ``identity`` (32 bytes: all that decides what the
    pools mean). ``is_warm``: an engine of the same identity has filled it before."""

    def __init__(self, path: str, identity: bytes) -> None:
        """OSError if it cannot be opened."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._identity, self._numbers, self._end = identity, list[int](), 0
        if os.fstat(self._descriptor).st_size < _ALIGN:
            os.ftruncate(self._descriptor, _ALIGN)
        self._pieces: list[tuple[int, int, int]] = []  # address, bytes, start
        self._header = self.take(_ALIGN)
        found = self._read()
        self.is_warm = found is not None
        self._known = found or []
        if found is None:
            self.forget()

    def forget(self) -> None:
        """It is not warm, and zeros; to be called before memory is taken."""
        self.is_warm, self._known = False, []
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, _ALIGN)

    def _read(self) -> list[int] | None:
        """The numbers of a whole header of this identity."""
        fields = bytes(self._header[: _HEADER.size])
        (checksum,) = _CHECKSUM.unpack_from(self._header.data, _HEADER.size)
        magic, identity, num_bytes, *numbers = _HEADER.unpack(fields)
        if (magic, identity, checksum) != (_MAGIC, self._identity, zlib.crc32(fields)):
            return None
        return numbers if os.fstat(self._descriptor).st_size == num_bytes else None

    @property
    def num_held(self) -> int:
        """Bytes of the machine's memory that it holds now."""
        return os.fstat(self._descriptor).st_blocks * 512

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The numbers that the first engine gave in this call; of a new memory, ``numbers``."""
        first = len(self._numbers)
        self._numbers += self._known[first : first + len(numbers)] if self.is_warm else numbers
        return self._numbers[first:]

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next ``num_bytes``, uint8: zeros in a new memory, what was there in a warm one."""
        size = -(-num_bytes // _ALIGN) * _ALIGN
        start, self._end = self._end, self._end + size
        if os.fstat(self._descriptor).st_size < self._end:
            os.ftruncate(self._descriptor, self._end)
        data = np.frombuffer(mmap.mmap(self._descriptor, size, offset=start), np.uint8)
        self._pieces.append((data.ctypes.data, size, start))
        return data[:num_bytes]

    def place_of(self, space: int, tensor: Tensor) -> KeptTensor:
        """Where a pool's tensor, [layers, pages, ...], lies."""
        address = tensor.data_ptr()
        for first, size, start in self._pieces:
            if first <= address < first + size:
                layers, pages = tensor.shape[:2]
                row_bytes = tensor.nbytes // (layers * pages)
                return KeptTensor(space, start + address - first, layers, pages, row_bytes)
        raise ValueError("the tensor is not in this memory")

    def list_tensors(self, tensors: Sequence[KeptTensor]) -> None:
        """Tell other processes what is where (``kept_rows``)."""
        data = msgspec.msgpack.encode([tuple(one) for one in tensors])
        self._header[_TABLE_AT : _TABLE_AT + len(data)] = np.frombuffer(data, np.uint8)
        self._header[_TABLE_AT - 8 : _TABLE_AT].view(np.int64)[0] = len(data)

    def seal(self) -> None:
        """All is taken: from now on the next engine may find it warm."""
        numbers = self._numbers + [0] * (_MAX_NUMBERS - len(self._numbers))
        fields = _HEADER.pack(_MAGIC, self._identity, self._end, *numbers)
        self._header[: _HEADER.size] = np.frombuffer(fields, np.uint8)
        _CHECKSUM.pack_into(self._header.data, _HEADER.size, zlib.crc32(fields))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it pools on the host are made in this memory."""
        _lender.memory = self
        try:
            yield
        finally:
            _lender.memory = None


def kept_rows(path: str) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]:
    """The pools of another rank, whose kept memory is at ``path``, by space: each uint8 [layers,
    pages, bytes], to read only. OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)
    length = int(data[_TABLE_AT - 8 : _TABLE_AT].view(np.int64)[0])
    table = data[_TABLE_AT : _TABLE_AT + length].tobytes()
    spaces: tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]] = ([], [])
    for one in map(KeptTensor._make, msgspec.msgpack.decode(table, type=list[list[int]])):
        num_bytes = one.layers * one.pages * one.row_bytes
        rows = data[one.start : one.start + num_bytes]
        spaces[one.space].append(rows.reshape(one.layers, one.pages, one.row_bytes))
    return spaces


def pool_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, is_zero: bool = True
) -> Tensor:
    """A tensor of a pool. ``is_zero``: in memory that no engine has filled before, all zeros."""
    lender: KeptMemory | None = getattr(_lender, "memory", None)
    if lender is None or device.type != "cpu" or not math.prod(shape):
        make = torch.zeros if is_zero else torch.empty
        return make(*shape, dtype=dtype, device=device)
    memory = lender.take(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def drop_pages(tensor: Tensor) -> None:
    """Give whole pages of a host tensor's memory back to the system; addresses stay. They read as
    zeros, those of a mapped file as the file, until they are written again; in a memfd
    (``KeptMemory``) too. OSError where the system refuses."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if num_bytes <= 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # MADV_REMOVE frees shared memory and refuses private memory, which MADV_DONTNEED frees
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice) == 0:
            return
    raise OSError(ctypes.get_errno(), f"madvise of {num_bytes} bytes of a {tensor.dtype} tensor")


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of a host tensor in pages that are in memory now: the system gives a page of zeros its
    memory when it is first written."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE)
    flags = np.zeros(num_pages, np.uint8)
    size, out = ctypes.c_size_t(num_pages * mmap.PAGESIZE), flags.ctypes.data_as(ctypes.c_void_p)
    if not tensor.nbytes or ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), size, out):
        return tensor.nbytes  # a system that does not tell
    return min(tensor.nbytes, int((flags & 1).sum()) * mmap.PAGESIZE)
