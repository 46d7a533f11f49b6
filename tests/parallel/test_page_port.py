"""What the tiers hold in memory is looked up without the worker's threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.fakes.tiers import DictTier

import radixlm.tiers.at_once as at_once_module
from radixlm.parallel.page_port import PagePort
from radixlm.tiers.base import Done, Found, Get, Lookup, PageRecord, Put, Report
from radixlm.tiers.codec import Codec
from radixlm.tiers.host import HostTier
from radixlm.tiers.row_memory import RowMemory
from radixlm.tiers.worker import PageWorker

KEYS = [bytes([i]) * 32 for i in range(3)]


class _Pages:
    """Pools of pages of 8 bytes that nobody reads."""

    def nbytes(self, space: int) -> int:
        return 8 * (space == 0)

    def fence(self) -> None:
        return None

    read = write = None


def _host() -> HostTier:
    host = HostTier(1 << 10, Codec())
    row, tokens = np.zeros(8, np.uint8), np.zeros(4, np.int32)
    host.put([PageRecord(key, bytes(32), tokens, row.copy()) for key in KEYS[:2]])
    return host


@pytest.mark.parametrize("below", [[], [DictTier("storage")]], ids=["index", "store"])
def test_an_index_answers_at_once_and_a_store_later(below: list[DictTier]) -> None:
    worker = PageWorker([_host(), *below], _Pages(), 4)  # type: ignore[arg-type]
    port = PagePort(worker)
    port.send(Lookup(1, KEYS))
    reports = port.settle(20.0) if below else port.poll()
    assert bool(worker._threads) == bool(below)
    (found,) = reports
    assert isinstance(found, Found) and found.ends == [1, 2] and found.tiers[0] == ("host", 2)
    worker.close()


class _Table:
    """Pools of 8 pages of 8 bytes."""

    is_on_host = True

    def __init__(self) -> None:
        self.data = np.arange(64, dtype=np.uint8).reshape(8, 8)
        self.teams: list[bool] = []

    def nbytes(self, space: int) -> int:
        return 8 * (space == 0)

    def fence(self) -> None:
        return None

    def read(
        self, space: int, pages: Any, out: Any, fence: Any = None, *, is_team: bool = False
    ) -> None:
        self.teams.append(is_team)
        for row, page in zip(out, pages.tolist(), strict=True):
            row[:] = self.data[page]

    def write(self, space: int, pages: Any, data: Any, fence: Any = None, *, is_team: bool) -> None:
        self.teams.append(is_team)
        self.data[pages] = data


@pytest.mark.parametrize("is_on_host", [True, False])
def test_pages_in_memory_are_copied_without_a_thread(is_on_host: bool) -> None:
    rows = RowMemory(8, 1 << 12)
    rows.make(lambda: True)
    if not rows.num_bytes:
        pytest.skip("memory cannot be made ahead here")
    host, table = HostTier(1 << 10, Codec(), rows=rows), _Table()
    table.is_on_host = is_on_host
    worker = PageWorker([host], table, 4)
    port = PagePort(worker)
    pages, tokens = np.array([5, 3, 6], np.int32), np.zeros(12, np.int32)
    port.send(Put(1, KEYS, [bytes(32), *KEYS[:2]], pages.tobytes(), tokens.tobytes()))
    reports = port.poll() if is_on_host else port.settle(20.0)
    assert [(r.job, r.num_pages) for r in reports if isinstance(r, Done)] == [(1, 3)]
    port.send(Get(2, KEYS, np.array([1, 2, 4], np.int32).tobytes()))
    reports = port.poll() if is_on_host else port.settle(20.0)
    assert [(r.job, r.num_pages) for r in reports if isinstance(r, Done)] == [(2, 3)]
    assert np.array_equal(table.data[[1, 2, 4]], table.data[pages])
    assert bool(worker._threads) == (not is_on_host) and set(table.teams) == {is_on_host}
    worker.close()


def test_a_fault_of_the_pools_is_a_miss_in_the_thread_of_the_steps_too() -> None:
    table = _Table()
    worker = PageWorker([_host()], table, 4)
    port = PagePort(worker)
    port.send(Get(1, KEYS[:2], np.array([1, 99], np.int32).tobytes()))
    assert port.poll() == [Done(1, 0)] and not worker._threads
    worker.close()


def test_many_pages_or_those_that_nobody_waits_for_do_not_hold_up_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = PageWorker([_host()], _Table(), 4)
    port, pages = PagePort(worker), np.array([1, 2], np.int32).tobytes()
    port.send(Get(1, KEYS[:2], pages, is_behind=True))
    assert worker._threads and len(port.settle(20.0)) == 2
    monkeypatch.setattr(at_once_module, "AT_ONCE_BYTES", 15)
    for num_keys, is_at_once in ((2, False), (1, True)):
        callers: list[int] = []
        told = threading.Event()

        def answer(report: Report, callers: Any = callers, told: Any = told) -> None:
            callers.append(threading.get_ident())
            if isinstance(report, Done):
                told.set()

        worker.send(Get(2, KEYS[:num_keys], pages[: 4 * num_keys]), answer)
        assert told.wait(20.0)
        assert (callers[0] == threading.get_ident()) == is_at_once
    worker.close()
