"""Memory that is made ahead: each row has one owner, and comes back when nobody has its array."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from radixlm.tiers.base import PageRecord
from radixlm.tiers.codec import Codec
from radixlm.tiers.host import HostTier
from radixlm.tiers.row_memory import RowMemory

from .faulty_files import chain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
NBYTES = 5000


def _made(num_rows: int) -> RowMemory:
    memory = RowMemory(NBYTES, num_rows * 5056)
    memory.make(lambda: True)
    if not memory.num_bytes:
        pytest.skip("Linux before 5.14")
    return memory


def test_rows_are_given_once_and_come_back_with_the_last_view() -> None:
    memory = _made(4)
    assert memory.num_bytes == 4 * 5056
    rows = memory.take(3)
    for number, row in enumerate(rows):
        assert row.shape == (NBYTES,) and row.dtype == np.uint8
        row[:] = number
    assert [set(row.tolist()) for row in rows] == [{0}, {1}, {2}]
    assert memory.take(2) == [] and memory.num_bytes == 5056
    part = rows[1][7:9]
    rows.clear()
    del row
    assert memory.num_bytes == 3 * 5056 and part.tolist() == [1, 1]
    others = memory.take(3)
    for row in others:
        row[:] = 9
    assert part.tolist() == [1, 1]
    del part
    assert memory.num_bytes == 5056


def test_nothing_is_made_when_it_is_over_and_what_is_trimmed_is_gone() -> None:
    memory = RowMemory(NBYTES, 4 * 5056)
    memory.make(lambda: False)
    assert memory.take(1) == []
    memory = _made(4)
    memory.trim(2 * 5056)
    assert memory.num_bytes == 2 * 5056
    assert len(memory.take(2)) == 2 and memory.take(1) == []


def _resident(address: int) -> int:
    """Bytes in RAM of the mapping with this address; others come and go with other tests."""
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            first, mark, rest = line.partition("-")
            if mark and " " in rest and " " not in first:
                is_here = int(first, 16) <= address < int(rest.split()[0], 16)
            elif line.startswith("Rss:") and is_here:
                return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def test_trimmed_memory_goes_back_to_the_system() -> None:
    memory = RowMemory(1 << 20, 64 << 20)
    before = _resident(memory.address_of(0))

    def grown() -> int:
        return _resident(memory.address_of(0)) - before

    memory.make(lambda: True)
    if not memory.num_bytes:
        pytest.skip("Linux before 5.14")
    assert grown() > 48 << 20
    memory.trim(64 << 20)
    assert grown() < 16 << 20 and not memory.num_bytes


def test_pages_and_spare_memory_stay_within_the_budget_and_a_sixteenth() -> None:
    memory = _made(32)
    tier = HostTier(32 * NBYTES, Codec(), rows=memory)
    keys, tokens = chain(200), np.zeros(4, np.int32)
    rng = np.random.default_rng(0)
    for key in keys:
        row = next(iter(tier.new_rows(1, NBYTES)), np.empty(NBYTES, np.uint8))
        row[:] = rng.integers(0, 256, NBYTES, np.uint8)
        tier.put([PageRecord(key, bytes(32), tokens, row)])
        del row
        stats = tier.stats()
        assert stats["bytes"] <= 32 * NBYTES
        assert stats["bytes"] + memory.num_bytes <= 34 * 5056
        tier.offer(key, 1, b"x" * 100)  # compressed by another tier: its row is free
    assert tier.new_rows(1, NBYTES - 1) == []
    tier.close()


def test_pages_to_be_kept_get_the_memory_of_those_that_go() -> None:
    memory = _made(4)
    tier = HostTier(4 * NBYTES, Codec(), rows=memory)
    keys, tokens = chain(6), np.zeros(4, np.int32)
    records = [
        PageRecord(key, bytes(32), tokens, row)
        for key, row in zip(keys, tier.new_rows(4, NBYTES), strict=False)
    ]
    tier.put(records)
    records.clear()
    assert tier.new_rows(2, NBYTES) == [] and tier.contains(keys) == 4  # nobody makes room
    assert len(tier.new_rows(2, NBYTES, is_put=True)) == 2
    assert tier.contains(keys[:1]) == 0 and tier.contains(keys[2:]) == 2  # the oldest went
    tier.close()
