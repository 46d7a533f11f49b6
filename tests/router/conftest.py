"""Mock workers for tests of the gateway, in the test's loop or as processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from tests.router.mock_worker import Faults, MockWorker
from tests.router.processes import Process, mock_process

StartWorkers = Callable[..., Awaitable[list[MockWorker]]]


@pytest.fixture
async def start_workers() -> AsyncIterator[StartWorkers]:
    """``await start_workers(2, latency_s=0.1)``: mock workers in the test's loop; the fields are
    those of `Faults`."""
    started: list[MockWorker] = []

    async def start(num_workers: int = 1, **faults: Any) -> list[MockWorker]:
        workers = [await MockWorker(Faults(**faults)).start() for _ in range(num_workers)]
        started.extend(workers)
        return workers

    yield start
    for worker in started:
        await worker.kill()


@pytest.fixture
def start_mock() -> Iterator[Callable[..., Process]]:
    """``start_mock("--latency-ms", "5")``: a mock worker as a process."""
    started: list[Process] = []

    def start(*flags: str) -> Process:
        started.append(mock_process(*flags))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that `radixlm router` runs on."""
    return uvloop.EventLoopPolicy()
