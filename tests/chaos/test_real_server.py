"""Long runs against the real server (`make chaos`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# both can be reduced for a short run
NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "20"))
NUM_LEAVERS = int(os.environ.get("CHAOS_LEAVERS", "1000"))
NUM_STREAMS = 64


def _body(seed: int, new: int) -> dict[str, Any]:
    rng = random.Random(seed)
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))]
    sampling: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 0.9, "sampling_seed": seed, "frequency_penalty": 0.3}
    return {"input_ids": ids, "sampling_params": sampling}


def _until_idle(server: RunningServer, timeout_s: float = 60.0) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while (info := server.info())["num_running_reqs"] + info["num_waiting_reqs"]:
        assert time.monotonic() < deadline_s, info
        time.sleep(0.05)
    return info


def _check_nothing_lost(server: RunningServer) -> None:
    server.wait_ready()
    assert _until_idle(server)["num_breaches"] == 0
    server.post("/flush_cache")
    assert server.info()["num_used_tokens"] == 0


def _engine(server: RunningServer) -> psutil.Process | None:
    try:
        return server.engine()
    except (AssertionError, psutil.NoSuchProcess):
        return None


async def _reference(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[list[int]]:
    calls = [client.post("/generate", json=body) for body in bodies]
    return [answer.json()["output_ids"] for answer in await asyncio.gather(*calls)]


async def test_kills_and_stops_during_64_streams() -> None:
    """Rounds of streams until the engine has died NUM_KILLS times; sometimes it hangs."""
    bodies = [_body(seed, 150) for seed in range(NUM_STREAMS)]
    flags = ("--max-engine-restarts", "1000", "--watchdog-timeout", "3")
    rng = random.Random(20)
    pauses_s: list[float] = []
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer(*flags, model=model) as server:
        # no idle connections, because the server may close one at the moment of its reuse
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=1700, limits=limits) as client:
            want = await _reference(client, bodies)
            is_over = False

            async def kill() -> None:
                nonlocal is_over
                for i in range(NUM_KILLS):
                    await client.post("/slow_down", json={"forward_sleep_time": 0.02})
                    await asyncio.sleep(rng.uniform(0.5, 1.5))
                    victim = _engine(server)
                    assert victim is not None
                    victim.send_signal(signal.SIGSTOP if i % 7 == 6 else signal.SIGKILL)
                    struck_s = time.monotonic()
                    while (engine := _engine(server)) is None or engine.pid == victim.pid:
                        await asyncio.sleep(0.02)
                    while (await client.get("/ready")).status_code != 200:
                        await asyncio.sleep(0.02)
                    pauses_s.append(time.monotonic() - struck_s)
                is_over = True

            killer = asyncio.create_task(kill())
            num_rounds = 0
            while not is_over:
                try:
                    assert await _reference(client, bodies) == want
                except httpx.HTTPError as error:
                    raise AssertionError("".join(server.log[-40:])) from error
                num_rounds += 1
                if killer.done():
                    break
            await killer
        _check_nothing_lost(server)
        print(f"{NUM_KILLS} deaths in {num_rounds} rounds of {NUM_STREAMS} streams; ready again")
        print(f"after {sorted(pauses_s)[len(pauses_s) // 2]:.1f} s, at most {max(pauses_s):.1f} s")
        assert server.terminate() == 0


async def _leave(server: RunningServer, seed: int) -> None:
    """Request a stream over a bare socket and disconnect at a random moment."""
    rng = random.Random(seed)
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = httpx.Request("POST", server.url, json={**_body(seed, 150), "stream": True}).content
    head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    kind = rng.randrange(4)
    writer.write(message[: rng.randrange(len(message))] if kind == 0 else message)
    if kind > 1:
        await reader.read(rng.randint(1, 2000))
    if kind == 3:  # the kernel answers data in flight with a reset
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_storm_of_clients_that_leave() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer("--max-total-tokens", "8192", model=model) as server:
        process = psutil.Process(server.process.pid)

        async def storm(first: int, count: int) -> None:
            for at in range(first, first + count, 50):
                await asyncio.gather(*(_leave(server, s) for s in range(at, at + 50)))

        await storm(0, 200)  # one-time allocations have happened by now
        _until_idle(server)
        before = (process.memory_info().rss, process.num_fds(), process.num_threads())
        await storm(1000, NUM_LEAVERS)
        _until_idle(server)
        deadline_s = time.monotonic() + 30
        while process.num_fds() > before[1] and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        after = (process.memory_info().rss, process.num_fds(), process.num_threads())
        print(f"(bytes, descriptors, threads) before {before} and after {after}")
        assert after[1] <= before[1] and after[2] <= before[2]
        assert after[0] < before[0] * 1.02 + (4 << 20)
        _check_nothing_lost(server)
        assert server.terminate() == 0
