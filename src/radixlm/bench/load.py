"""Sends rows at a request rate with a limit of concurrent requests, and collects the outcomes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.bench.progress import Progress


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate`: requests a second of a Poisson process; infinite sends all at once."""

    rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate {self.rate}: more than 0, or inf")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency}: at least 1")

    def arrivals_s(self, count: int) -> list[float]:
        """When each request is sent, in seconds from the start of the run."""
        if math.isinf(self.rate):
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).exponential(1.0 / self.rate, count)
        gaps[0] = 0.0
        return [float(at) for at in np.cumsum(gaps)]


async def run_load(
    rows: Sequence[Row],
    ask: Callable[[Row], Awaitable[Outcome]],
    traffic: Traffic,
    progress: Progress,
) -> tuple[list[Outcome], float]:
    """(outcomes in the order of the rows, seconds from the first request to the last answer).

    A request's time starts when it is sent; waiting for `max_concurrency` does not count.
    """
    gate = asyncio.Semaphore(traffic.max_concurrency or len(rows))

    async def one(row: Row) -> Outcome:
        async with gate:
            outcome = await ask(row)
        progress.add(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    start_s = time.perf_counter()
    for row, at_s in zip(rows, traffic.arrivals_s(len(rows)), strict=True):
        wait_s = start_s + at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(row)))
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return outcomes, time.perf_counter() - start_s
