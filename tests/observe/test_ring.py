"""The ring of step records: what a reader sees while another process writes, or was killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.observe import ring as ring_module
from radixlm.observe.ring import COUNTS, FILE, NUM_BYTES, NUM_RECORDS, TIMES, StepRing


def fields(number: int) -> tuple[float, ...]:
    return (number * 0.5, *([number % 100 + 0.25] * len(TIMES)), *([number] * len(COUNTS)))


def shown(number: int) -> tuple[float, ...]:
    """What a reader gets: phases in milliseconds."""
    start_s, *rest = fields(number)
    times, counts = rest[: len(TIMES)], rest[len(TIMES) :]
    return (number, start_s, *(1e3 * one for one in times), *counts)


def test_a_reader_gets_what_was_written_in_order() -> None:
    ring = StepRing()
    for number in range(5):
        ring.write(*fields(number))
    assert list(ring.read(2)) == [shown(number) for number in (2, 3, 4)]
    assert list(ring.read(5)) == [] and ring.end == 5


@given(st.integers(0, 3 * NUM_RECORDS), st.integers(0, 3 * NUM_RECORDS))
def test_the_ring_keeps_the_last_records(count: int, first: int) -> None:
    buffer = bytearray(NUM_BYTES)
    ring = StepRing(buffer)
    start = max(0, count - NUM_RECORDS - 2)
    ring._next = start  # the records before it would be overwritten anyway
    for number in range(start, count):
        ring.write(*fields(number))
    # the oldest of them may be under the writer's pen
    least = max(first, count - NUM_RECORDS + 1, start)
    assert [record[0] for record in ring.read(first)] == list(range(least, count))


def test_torn_records_are_left_out() -> None:
    buffer = bytearray(NUM_BYTES)
    ring = StepRing(buffer)
    for number in range(4):
        ring.write(*fields(number))
    size = ring_module._RECORD.size
    for number, place in ((1, 0), (2, size - 8)):  # its begin, its end
        struct.pack_into("<q", buffer, ring_module._HEAD.size + number * size + place, 99)
    assert [record[0] for record in ring.read(0)] == [0, 3]


def test_a_ring_goes_on_after_its_writer(tmp_path: Path) -> None:
    assert StepRing.find(tmp_path) is None
    first = StepRing.open(tmp_path)
    first.write(*fields(0))
    reader = StepRing.find(tmp_path)
    assert reader is not None
    second = StepRing.open(tmp_path)
    second.write(*fields(1))
    assert [record[0] for record in reader.read(0)] == [0, 1]


def test_a_full_disk_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a signal at the first record."""
    StepRing.open(tmp_path)
    assert (tmp_path / FILE).stat().st_blocks * 512 >= NUM_BYTES

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        StepRing.open(tmp_path)


def test_memory_of_something_else_is_emptied() -> None:
    ring = StepRing(bytearray(b"x" * NUM_BYTES))
    assert ring.end == 0 and list(ring.read(0)) == []


def _write(folder: Path, count: int) -> None:
    ring = StepRing.open(folder)
    for number in range(count):
        ring.write(*fields(number))


def test_two_processes(tmp_path: Path) -> None:
    """Whatever the reader gets while the other writes is whole."""
    StepRing.open(tmp_path)
    reader, count, seen = StepRing.find(tmp_path), 20_000, 0
    assert reader is not None
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(tmp_path, count))
    process.start()
    try:
        while process.is_alive():
            for record in reader.read(seen):
                assert record == shown(int(record[0]))
                seen = int(record[0]) + 1
        process.join(20)
    finally:
        process.kill()
    assert process.exitcode == 0 and reader.end == count
    assert [record[0] for record in reader.read(count - 10)] == list(range(count - 10, count))
