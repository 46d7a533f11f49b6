"""Memory that is made ahead keeps its bytes, and no more of it is made than was asked for."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from radixlm.tiers import prefault as prefault_module
from radixlm.tiers.prefault import missing_bytes, prefault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
MIB = 1 << 20


def _resident(memory: mmap.mmap, address: int) -> int:
    """Bytes of the mapping at ``address`` that are in RAM."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(len(memory) // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_memory_that_was_not_used_is_missing() -> None:
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    address = array.ctypes.data
    spans = [(address, 3 * MIB), (address + 4 * MIB, 3 * MIB)]
    assert missing_bytes(spans) == 6 * MIB and missing_bytes([]) == 0
    array[4 * MIB : 5 * MIB] = 1
    assert missing_bytes(spans) == 5 * MIB


def test_spans_are_made_from_their_starts_and_keep_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    address = array.ctypes.data
    array[5] = 77
    spans = [(address, 3 * MIB), (address + 16 * MIB + 100, 6 * MIB)]
    assert prefault(spans, 1 << 30, lambda: True) == 0
    if not (made := prefault(spans, 1 << 30, lambda: False)):
        pytest.skip("Linux before 5.14")
    assert 9 * MIB <= made <= 9 * MIB + 4 * mmap.PAGESIZE
    assert 9 * MIB <= _resident(memory, address) <= 9 * MIB + 4 * mmap.PAGESIZE
    assert array[5] == 77 and not array[6:].any()
    monkeypatch.setattr(prefault_module, "_MAX_BYTES", 2 * MIB)
    assert prefault(spans, 1 << 30, lambda: False) == 2 * MIB
    assert prefault(spans, 0, lambda: False) == 0
