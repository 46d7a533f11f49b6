"""Deaths of random ranks under many streams, at every moment: `make chaos` runs the long form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.test_real_server import _body, _check_nothing_lost, _reference
from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

MODEL = None if "CHAOS_BUNDLED" in os.environ else str(cached_tiny("Qwen3ForCausalLM"))
NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "20"))
FLAGS = ("--max-engine-restarts", "1000", "--rank-timeout-s", "2", "--watchdog-timeout", "20")
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "one": (1,),
    "tp2": (2, "--tp-size", "2"),
    "tp3": (3, "--tp-size", "3"),
    "tp2pp2": (4, "--tp-size", "2", "--pp-size", "2"),
    "replicas2": (2, "--dp-size", "2"),
    "dp2": (2, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}


def segments(mark: str) -> set[str]:
    """Shared segments that a process with ``mark`` in its environment still has open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
            is_ours = (
                "memfd:radixlm" in target
                and mark.encode() in (link.parents[1] / "environ").read_bytes()
            )
        except OSError:  # the process or its descriptor has gone
            continue
        if is_ours:
            found.add(f"{link.parts[2]} {target}")
    return found


def ranks_of(server: RunningServer) -> list[psutil.Process]:
    """The processes of the replica; [] while it is being replaced."""
    try:
        return server.engines()
    except psutil.NoSuchProcess:
        return []


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """The token ids of a stream of server-sent events, each of which has those before it, too."""
    ids: list[int] = []
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        found = json.loads(line.removeprefix("data: "))["output_ids"]
        assert found[: len(ids)] == ids and len(found) > len(ids), "tokens came twice or changed"
        ids = found
    return ids


async def answers(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """The token ids of all requests, every other of them a stream."""
    whole, streams = _reference(client, bodies[::2]), (streamed(client, b) for b in bodies[1::2])
    found: list[list[int]] = [[]] * len(bodies)
    found[::2], *found[1::2] = await asyncio.gather(whole, *streams)
    return found


class Killer:
    """Strikes a random rank again and again, mostly by SIGKILL; now and then while ranks load."""

    def __init__(self, server: RunningServer, num_ranks: int, num_kills: int, seed: int) -> None:
        self._server, self._num_ranks, self._num_kills = server, num_ranks, num_kills
        self._rng = random.Random(seed)
        self.pauses_s: list[float] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        for number in range(self._num_kills):
            await client.post("/slow_down", json={"forward_sleep_time": 0.01})
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
            while len(before := ranks_of(self._server)) < self._num_ranks:
                await asyncio.sleep(0.01)
            struck_s = time.monotonic()
            signum = signal.SIGSTOP if number % 7 == 6 else signal.SIGKILL
            struck = [self._strike(before, signum)]
            if number % 5 == 4:  # one that takes its place, while it loads
                while not (loading := [p for p in ranks_of(self._server) if p not in before]):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self._rng.uniform(0.0, 0.8))
                struck.append(self._strike(loading, signal.SIGKILL))
            while not await self._is_whole(client, struck):
                await asyncio.sleep(0.02)
            if len(struck) == 1 and signum == signal.SIGKILL:
                self.pauses_s.append(time.monotonic() - struck_s)

    async def _is_whole(self, client: httpx.AsyncClient, struck: list[psutil.Process]) -> bool:
        """Whether every replica serves, without the processes that were struck."""
        found = ranks_of(self._server)
        if len(found) != self._num_ranks or any(process in struck for process in found):
            return False
        replicas = (await client.get("/get_server_info")).json()["replicas"]
        return all(replica["is_ready"] for replica in replicas)

    def _strike(self, processes: list[psutil.Process], signum: int) -> psutil.Process:
        """Send the signal to one of them; which one."""
        struck = self._rng.choice(processes)
        with contextlib.suppress(psutil.NoSuchProcess):  # its replica has ended already
            struck.send_signal(signum)
        return struck


async def strike(
    layout: str, folder: Path, num_kills: int, num_streams: int, seed: int
) -> list[float]:
    """Run rounds of streams until ``num_kills`` strikes have come; each round has the tokens of the
    undisturbed one. Seconds from each SIGKILL until all replicas served again."""
    num_ranks, *flags = LAYOUTS[layout]
    bodies: list[dict[str, Any]] = [_body(number, 80) for number in range(num_streams)]
    mark = str(uuid.uuid4())  # servers of other tests have segments too
    environment = {"TEST_SERVER": mark, "TMPDIR": str(folder)}
    with RunningServer(*flags, *FLAGS, model=MODEL, environment=environment) as server:
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=1700, limits=limits) as client:
            wanted = await _reference(client, bodies)
            killer = Killer(server, num_ranks, num_kills, seed)
            task = asyncio.create_task(killer.run(client))
            while not task.done():
                assert await answers(client, bodies) == wanted
            await task
        _check_nothing_lost(server)
        engines = server.engines()
        assert len(engines) == num_ranks, "ranks of dead replicas are left, or some are missing"
        held = [each for each in segments(mark) if "memfd:radixlm (" in each]
        assert len(held) <= num_ranks, held
        assert server.terminate() == 0
        assert not psutil.wait_procs(engines, 10)[1], "a rank has outlived its server"
    assert not segments(mark), "a segment has outlived its server"
    assert not list(folder.iterdir()), "a folder of sockets has outlived its server"
    return killer.pauses_s


async def test_two_deaths_of_ranks_change_no_stream(tmp_path: Path) -> None:
    await strike("tp2", tmp_path, 2, 12, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_many_deaths_of_ranks_change_no_stream(layout: str, tmp_path: Path) -> None:
    pauses_s = sorted(await strike(layout, tmp_path, NUM_KILLS, 64, seed=21))
    print(f"{NUM_KILLS} strikes; ready again after {pauses_s[len(pauses_s) // 2]:.1f} s (median)")
