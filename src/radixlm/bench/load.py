"""Sends rows at a request rate with a limit of concurrent requests, and collects the outcomes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.bench.progress import Progress


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate`: requests a second of a Poisson process; infinite sends all at once. `ramp`: the rate
    goes from `ramp_start` to `ramp_end` over the requests, in equal steps or factors."""

    rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 1
    ramp: str | None = None
    ramp_start: float | None = None
    ramp_end: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate {self.rate}: more than 0, or inf")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency}: at least 1")
        ends = (self.ramp_start, self.ramp_end)
        if self.ramp is None and ends != (None, None):
            raise ConfigError("--ramp-up-start-rps: give --ramp-up-strategy linear or exponential")
        if self.ramp is not None and not all(end is not None and end > 0 for end in ends):
            raise ConfigError(
                "--ramp-up-strategy: give --ramp-up-start-rps and --ramp-up-end-rps, above 0"
            )
        if self.ramp is not None and not math.isinf(self.rate):
            raise ConfigError("--request-rate: a ramp has its own rates; leave one of them out")

    def rates(self, count: int) -> NDArray[np.float64]:
        """Requests a second at each request."""
        if self.ramp is None:
            return np.full(count, self.rate)
        assert self.ramp_start is not None and self.ramp_end is not None
        share = np.arange(count) / max(1, count - 1)
        if self.ramp == "linear":
            return np.asarray(self.ramp_start + (self.ramp_end - self.ramp_start) * share)
        return np.asarray(self.ramp_start * (self.ramp_end / self.ramp_start) ** share)

    def arrivals_s(self, count: int) -> list[float]:
        """When each request is sent, in seconds from the start of the run."""
        if self.ramp is None and math.isinf(self.rate):
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).exponential(1.0 / self.rates(count))
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
    drawn_s = traffic.arrivals_s(len(rows))
    for row, by_rate_s in zip(rows, drawn_s, strict=True):
        at_s = by_rate_s if row.at_s is None else row.at_s
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
