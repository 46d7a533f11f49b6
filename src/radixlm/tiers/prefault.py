"""Memory of the pools, made before pages arrive: a page that the system has to make first takes
several times as long to fill as to read from a disk and to expand."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

_MADV_POPULATE_WRITE: Final = 23  # of Linux 5.14: changes no byte; elsewhere an error
_STEP_BYTES: Final = 2 << 20
_MAX_BYTES: Final = 2 << 30
_MAX_SHARE: Final = 0.25  # of the free memory

Spans = Sequence[tuple[int, int]]


def room_bytes(free_bytes: int) -> int:
    """How much of ``free_bytes`` of memory pages may take before a prompt needs them."""
    return min(_MAX_BYTES, int(_MAX_SHARE * free_bytes))


def prefault(spans: Spans, free_bytes: int, is_over: Callable[[], bool]) -> int:
    """Make the memory of ``spans``, (address, bytes) of one layer each, from the start of all of
    them, within a share of ``free_bytes`` of memory; bytes that are there now. Needs no lock:
    writers may run."""
    room, done = room_bytes(free_bytes), 0
    for offset in range(0, max((size for _, size in spans), default=0), _STEP_BYTES):
        for address, size in spans:
            start = address + offset
            end = address + min(size, offset + _STEP_BYTES)
            if offset >= size:
                continue
            if is_over() or done + end - start > room:
                return done
            if not populate(start, end - start):
                return done
            done += end - start
    return done


def missing_bytes(spans: Spans) -> int:
    """Of the memory of ``spans``, what the system makes only when it is used; all of it where the
    system does not tell."""
    missing = 0
    for address, size in spans:
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        there = np.zeros(-(-(address + size - first) // mmap.PAGESIZE), np.uint8)
        with suppress(OSError, AttributeError, TypeError):  # not Linux
            mincore = ctypes.CDLL(None).mincore
            mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
            mincore(first, len(there) * mmap.PAGESIZE, there.ctypes.data)
        num_there = int(np.count_nonzero(there & 1))
        missing += max(0, size - num_there * mmap.PAGESIZE)
    return missing


def populate(start: int, num_bytes: int) -> bool:
    """Make the memory of these addresses; False where the system does not. Changes no byte."""
    try:
        madvise = ctypes.CDLL(None).madvise  # releases the GIL
    except (OSError, AttributeError, TypeError):  # not Linux
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return not madvise(first, start + num_bytes - first, _MADV_POPULATE_WRITE)
