"""Arrival times, the concurrency limit and the order of outcomes."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.bench.load import Traffic, run_load
from radixlm.bench.progress import Progress

ROWS = [Row(str(i), None, 1, i) for i in range(9)]


@pytest.mark.parametrize("most", [1, 3, None])
async def test_no_more_than_the_limit_run(most: int | None) -> None:
    running = peak = 0

    async def ask(row: Row) -> Outcome:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(10 - row.num_output):  # later requests are faster
            await asyncio.sleep(0)
        running -= 1
        return Outcome(is_ok=True, num_output=row.num_output)

    outcomes, _ = await run_load(ROWS, ask, Traffic(max_concurrency=most), Progress(9, False))
    assert peak == (most or len(ROWS))
    assert [outcome.num_output for outcome in outcomes] == list(range(9))


async def test_an_exception_ends_the_run() -> None:
    async def ask(row: Row) -> Outcome:
        await asyncio.sleep(0 if row.num_output == 3 else 60)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_load(ROWS, ask, Traffic(), Progress(9, False))


def test_arrivals_are_a_poisson_process() -> None:
    times_s = Traffic(rate=20.0, seed=5).arrivals_s(4000)
    gaps_s = np.diff(times_s)
    assert times_s[0] == 0.0 and (gaps_s >= 0).all()
    assert abs(gaps_s.mean() * 20 - 1) < 0.05 and abs(gaps_s.std() * 20 - 1) < 0.08
    assert Traffic(rate=20.0, seed=5).arrivals_s(4000) == times_s
    assert Traffic(rate=20.0, seed=6).arrivals_s(4000) != times_s
    assert Traffic(rate=math.inf).arrivals_s(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": -1.0}, {"max_concurrency": 0}])
def test_impossible_traffic_is_refused(options) -> None:
    with pytest.raises(ConfigError):
        Traffic(**options)


def test_a_rate_of_nan_is_refused() -> None:
    with pytest.raises(ConfigError, match="--request-rate"):
        Traffic(rate=math.nan)
