"""Hedged streams: the client sees one answer, losers are aborted, the budget holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.router import hedge
from radixlm.router.hedge import MAX_SAVED, MIN_SEEN, Hedger
from radixlm.router.series import Counter
from tests.router.client import Response
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.mock_worker import MockWorker

CLASS = (len("hi") // 4 + 1).bit_length()  # of Front.chat's prompt


class Hedged(Front):
    """A gateway that knows that a first token takes ``late_s``, and may hedge ``saved`` times."""

    def __init__(self, workers: list[MockWorker], late_s: float = 0.02, saved: float = 1) -> None:
        super().__init__(workers, hedge=True, hedge_fraction=0.0)
        hedge.attach(self.gateway)
        self.hedger: Hedger = self.gateway.hedger
        self.hedger._saved = saved
        for _ in range(MIN_SEEN):
            self.hedger.saw(CLASS, late_s)

    @property
    def results(self) -> dict[Any, float]:
        return self.hedger.counter.values

    async def stream(self) -> Response:
        return await self.chat(stream=True, max_tokens=5)


async def until_left(worker: MockWorker) -> None:
    """Wait until the worker has lost a client."""
    async with asyncio.timeout(20):
        while not worker.num_left:
            await asyncio.sleep(0.005)


async def test_a_late_stream_is_answered_by_another_worker(start_workers: StartWorkers) -> None:
    (slow,) = await start_workers(1, latency_s=60.0)
    (quick,) = await start_workers(1)
    async with Hedged([slow, quick]) as front:
        hedged = await front.stream()
        await until_left(slow)  # it aborts
        assert (len(slow.seen), len(quick.seen)) == (1, 1)
        assert slow.seen[0].body == quick.seen[0].body
        assert front.is_idle and front.results == {("won",): 1}
        slow.faults.latency_s = 0.0
        plain = await front.stream()
        assert (hedged.status, hedged.is_complete) == (200, True)
        assert hedged.text == plain.text


async def test_the_first_worker_may_still_win(start_workers: StartWorkers) -> None:
    (slow,) = await start_workers(1, latency_s=0.1)
    (slower,) = await start_workers(1, latency_s=60.0)
    async with Hedged([slow, slower]) as front:
        assert (await front.stream()).is_complete
        await until_left(slower)
        assert front.is_idle and front.results == {("lost",): 1}
        assert front.outcomes(slow) == ["ok"] and not front.outcomes(slower)


@pytest.mark.parametrize("faults", [{"status": 503}, {"cut_after": 0}, {"cut_after": 150}])
async def test_a_second_worker_that_fails_does_no_harm(
    start_workers: StartWorkers, faults: dict[str, Any]
) -> None:
    (slow,) = await start_workers(1, latency_s=0.2)
    (bad,) = await start_workers(1, **faults)
    async with Hedged([slow, bad]) as front:
        answer = await front.stream()
        assert (answer.status, answer.is_complete) == (200, True)
        assert front.is_idle and front.outcomes(slow) == ["ok"] and len(front.outcomes(bad)) == 1


async def test_both_may_fail_and_the_request_is_tried_again(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, latency_s=0.05, fail_first=1)
    async with Hedged(workers) as front:
        answer = await front.stream()
        assert (answer.status, answer.is_complete) == (200, True)
        assert front.is_idle


async def test_a_client_that_leaves_ends_both(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, latency_s=60.0)
    async with Hedged(workers) as front:
        task = asyncio.create_task(front.stream())
        async with asyncio.timeout(20):
            while not all(worker.seen for worker in workers):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(*map(until_left, workers))
        assert front.is_idle


async def test_what_is_no_stream_or_has_no_budget_is_not_hedged(
    start_workers: StartWorkers,
) -> None:
    workers = await start_workers(2, latency_s=0.1)
    async with Hedged(workers, saved=0) as front:
        assert (await front.stream()).is_complete
        front.hedger._saved = 5
        assert (await front.chat()).status == 200
        assert sum(len(worker.seen) for worker in workers) == 2
        assert not front.results


@given(
    fraction=st.floats(0, 1),
    wants=st.lists(st.booleans(), max_size=300),
)
def test_no_more_than_the_fraction_is_hedged(fraction: float, wants: list[bool]) -> None:
    hedger = Hedger(fraction, Counter("", (), ()))
    num_hedged = 0
    for number, wants_one in enumerate(wants, start=1):
        hedger.late_s(0)
        num_hedged += wants_one and hedger.take()
        assert num_hedged <= fraction * number + 1e-6
    assert hedger._saved <= MAX_SAVED


def test_late_is_the_95th_percentile_of_the_length_class() -> None:
    hedger = Hedger(0.05, Counter("", (), ()))
    for number in range(100):
        assert hedger.late_s(9) is None
        hedger.saw(8, number / 100)
    assert hedger.late_s(8) == 0.95
