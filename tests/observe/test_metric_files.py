"""Counts of several processes on a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict

from radixlm.observe.metric_files import FIRST_BYTES, AllocatedDict


def fill(counts: MmapedDict, number: int) -> dict[str, float]:
    """Enough keys for a file to grow."""
    wanted = {f"key {n} " + "x" * 90: float(n) for n in range(number)}
    for key, value in wanted.items():
        counts.write_value(key, value, 0.0)
    assert {key: counts.read_value(key)[0] for key in wanted} == wanted
    return wanted


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_has_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    counts = AllocatedDict(str(path))
    for number in (1, 1000):
        wanted = fill(counts, number)
        assert path.stat().st_blocks * 512 >= path.stat().st_size >= FIRST_BYTES
    assert path.stat().st_size > FIRST_BYTES
    found = {key: value for key, value, _, _ in MmapedDict.read_all_values_from_file(path)}
    assert found == wanted
    counts.close()
    again = AllocatedDict(str(path))  # of a process with the same number
    assert {key: value for key, value, _ in again.read_all_values()} == wanted
    again.close()


@pytest.mark.parametrize("is_full_at_first", [True, False])
def test_without_room_it_counts_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full_at_first: bool
) -> None:
    path = tmp_path / "a.db"
    if is_full_at_first:
        monkeypatch.setattr("os.posix_fallocate", full)
    counts = AllocatedDict(str(path))
    monkeypatch.setattr("os.posix_fallocate", full)
    fill(counts, 2000)
    counts.close()
    assert is_full_at_first != path.exists()
    if not is_full_at_first:  # what others read is what was there before
        assert len(list(MmapedDict.read_all_values_from_file(path))) > 100
        assert path.stat().st_size == FIRST_BYTES
