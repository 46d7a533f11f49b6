"""A gateway takes a shared port over from another: no connection is refused or reset."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import pytest

from radixlm.router.answer import Answer
from radixlm.router.app import Gateway
from radixlm.router.call import Call
from radixlm.router.hand_over import hand_over, num_listening
from radixlm.router.launch import bind
from radixlm.router.options import Options
from tests.router.client import ask

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs SO_REUSEPORT")


async def start(name: str, port: int = 0) -> tuple[Gateway, object, int]:
    """A gateway that answers GET /who with its name."""
    gateway = Gateway(Options(), parts=())

    async def who(call: Call) -> Answer:
        return Answer(200, name.encode(), "text/plain")

    gateway.routes.add("GET", "/who", who, "open")
    sock = bind("127.0.0.1", port, is_shared=True)
    await gateway.start(sock)
    return gateway, sock, sock.getsockname()[1]


async def test_new_connections_go_to_the_gateway_that_came_last() -> None:
    old, sock, port = await start("old")
    new, _, _ = await start("new", port)
    assert num_listening(port) == 2
    seen: Counter[str] = Counter()

    async def client() -> None:
        answer = await ask(f"http://127.0.0.1:{port}", "GET", "/who")
        assert answer.status == 200 and answer.is_complete
        seen[answer.body.decode()] += 1

    async def clients() -> None:
        while True:
            await asyncio.gather(*(client() for _ in range(8)))

    try:
        task = asyncio.create_task(clients())
        async with asyncio.timeout(20):
            while not (seen["new"] and seen["old"]):
                await asyncio.sleep(0.005)
        assert await hand_over(sock)  # type: ignore[arg-type]
        num_old = seen["old"]
        for _ in range(30):
            await client()
        assert seen["old"] == num_old
        await old.drain(1)
        await old.stop()
        num_new = seen["new"]
        for _ in range(30):
            await client()
        assert seen["new"] >= num_new + 30 and not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        await old.stop()
        await new.stop()


async def test_a_gateway_alone_hands_nothing_over() -> None:
    alone, sock, port = await start("alone")
    try:
        assert num_listening(port) == 1
        assert not await hand_over(sock)  # type: ignore[arg-type]
    finally:
        await alone.stop()
