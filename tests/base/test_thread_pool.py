"""FairThreadPool: bounded by client, round the clients that wait, with calls that never end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from radixlm.base.errors import Overloaded
from radixlm.base.thread_pool import FairThreadPool


class Calls:
    """Calls that begin, in order, and wait until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._goes: dict[str, threading.Event] = {}

    def hang(self, name: str) -> str:
        self.begun.append(name)
        self._goes.setdefault(name, threading.Event()).wait(60)
        return name

    def let_go(self, *names: str) -> None:
        for name in names:
            self._goes.setdefault(name, threading.Event()).set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def hanging(pool: FairThreadPool, names: list[str]) -> AsyncIterator[tuple[Calls, list]]:
    """Calls of ``pool`` by the client that each name begins with."""
    calls = Calls()
    tasks = [asyncio.ensure_future(pool.run((name[0],), calls.hang, name)) for name in names]
    try:
        yield calls, tasks
    finally:
        calls.let_go(*names)
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_client_leaves_threads_to_others() -> None:
    pool = FairThreadPool("tests", 3, (2,))
    names = [f"a{i}" for i in range(60)]
    async with hanging(pool, names) as (calls, _):
        await until(lambda: len(calls.begun) == 2)
        assert await pool.run(("b",), str, 5) == "5"
        assert sorted(calls.begun) == ["a0", "a1"]
    assert len(calls.begun) == 60


async def test_free_threads_go_round_the_clients() -> None:
    pool = FairThreadPool("tests", 1, (1,))
    async with hanging(pool, ["a1", "a2", "a3", "b1", "b2", "c1"]) as (calls, _):
        order = ["a1", "a2", "b1", "c1", "a3", "b2"]
        for i, name in enumerate(order):
            await until(lambda i=i: len(calls.begun) == i + 1)  # type: ignore[misc]
            assert calls.begun == order[: i + 1]
            calls.let_go(name)


async def test_a_second_part_of_the_key_has_its_own_limit() -> None:
    pool = FairThreadPool("tests", 8, (3, 2))
    calls = Calls()
    keys = [("a", "slow")] * 5 + [("a", "other")] * 5
    tasks = [
        asyncio.ensure_future(pool.run(key, calls.hang, f"{key[1]}{i}"))
        for i, key in enumerate(keys)
    ]
    await until(lambda: len(calls.begun) == 3)
    assert sorted(calls.begun) == ["other5", "slow0", "slow1"]
    assert await pool.run(("b", "slow"), str, 5) == "5"
    calls.let_go(*(f"{key[1]}{i}" for i, key in enumerate(keys)))
    await asyncio.gather(*tasks)


async def test_a_cancelled_call_counts_until_its_thread_ends() -> None:
    pool = FairThreadPool("tests", 1, (1,))
    async with hanging(pool, ["a1", "b1", "c1"]) as (calls, tasks):
        await until(lambda: calls.begun == ["a1"])
        tasks[0].cancel()
        tasks[1].cancel()  # while it waits
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert calls.begun == ["a1"]
        calls.let_go("a1", "c1")
        assert await tasks[2] == "c1"
    assert calls.begun == ["a1", "c1"]
    assert await pool.run(("a",), str, 5) == "5"


async def test_too_many_calls_that_wait_are_refused() -> None:
    pool = FairThreadPool("fetches", 1, (1,), max_waiting=2)
    async with hanging(pool, ["a1", "a2", "a3"]) as (calls, _):
        await until(lambda: calls.begun == ["a1"])
        with pytest.raises(Overloaded, match="2 fetches of this client wait"):
            await pool.run(("a",), str, 5)


async def test_an_error_is_raised_and_frees_its_place() -> None:
    pool = FairThreadPool("tests", 1, (1,))
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run(("a",), int, "x")
