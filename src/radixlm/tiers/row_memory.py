"""Memory for pages in RAM, made ahead: the first use of a page of memory costs more than to copy
its bytes, on a virtual machine ten times as much."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from radixlm.tiers.base import Payload
from radixlm.tiers.prefault import populate

_STEP_BYTES = 1 << 20
_ALIGN = 64


class RowMemory:
    """Rows of ``row_bytes`` in one mapping of at most ``max_bytes``. They are given out once
    ``make`` has made them, and come back when nobody has the array any more."""

    def __init__(self, row_bytes: int, max_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._stride = -(-row_bytes // _ALIGN) * _ALIGN
        self._num_rows, self._num_made = max_bytes // self._stride, 0
        self._free: deque[int] = deque()  # its methods are atomic
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
        self._memory = mmap.mmap(-1, max(1, self._num_rows * self._stride), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]

    @property
    def num_bytes(self) -> int:
        """Of rows that nobody has."""
        return len(self._free) * self._stride

    def make(self, goes_on: Callable[[], bool]) -> None:
        """Make the rows, in a thread of its own. ``goes_on``: asked between parts of it."""
        step = max(1, _STEP_BYTES // self._stride)
        while (first := self._num_made) < self._num_rows and goes_on():
            rows = range(first, min(self._num_rows, first + step))
            if not populate(self.address_of(first), len(rows) * self._stride):
                return
            self._num_made = rows.stop
            self._free.extend(rows)

    def trim(self, num_bytes: int) -> None:
        """Give memory of rows that nobody has back to the system, for good."""
        while num_bytes > 0 and self._free:
            with suppress(IndexError):  # somebody took it
                first = self._free.pop() * self._stride
                start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
                size = (first + self._stride) // mmap.PAGESIZE * mmap.PAGESIZE - start
                if size > 0:
                    self._memory.madvise(mmap.MADV_DONTNEED, start, size)
                num_bytes -= self._stride

    def take(self, count: int) -> list[Payload]:
        """Arrays, uint8 [row_bytes], of any bytes; none if there are fewer than ``count``."""
        try:
            rows = [_Row(self, self._free.popleft()) for _ in range(count)]
        except IndexError:
            return []  # those that were taken come back by themselves
        return [np.asarray(row) for row in rows]

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def address_of(self, number: int) -> int:
        return int(self._address) + number * self._stride


class _Row:
    """What an array of a row, and each view of it, has as its base."""

    __slots__ = ("__array_interface__", "_memory", "_number")

    def __init__(self, memory: RowMemory, number: int) -> None:
        self._memory, self._number = memory, number
        self.__array_interface__: dict[str, Any] = {
            "shape": (memory.row_bytes,), "typestr": "|u1", "version": 3,
            "data": (memory.address_of(number), False),
        }  # fmt: skip

    def __del__(self) -> None:
        self._memory.give_back(self._number)
