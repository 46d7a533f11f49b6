"""--dp-size 2: two engine processes behind one server. One dies, hangs or exceeds its restarts."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

NUM_STREAMS = 8
FLAGS = ("--dp-size", "2", "--max-total-tokens", "8192", "--watchdog-timeout", "3")


def _body(seed: int) -> dict[str, Any]:
    ids = [(seed * 7 + i * 13) % 240 + 5 for i in range(8 + seed)]
    sampling: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 1.0, "sampling_seed": seed}
    return {"input_ids": ids, "sampling_params": sampling}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    flags = (*FLAGS, "--max-engine-restarts", "50", "--enable-metrics")
    with RunningServer(*flags, model=model) as running:
        _until_both(running)
        yield running


def _replicas(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/get_server_info").json()["replicas"]
    return found


def _until_both(server: RunningServer) -> None:
    until_s = time.monotonic() + 120
    while not all(replica["is_ready"] for replica in _replicas(server)):
        assert time.monotonic() < until_s, "".join(server.log)
        time.sleep(0.05)


async def _answers(client: httpx.AsyncClient) -> list[list[int]]:
    calls = [client.post("/generate", json=_body(seed)) for seed in range(NUM_STREAMS)]
    return [answer.json()["output_ids"] for answer in await asyncio.gather(*calls)]


def test_both_serve_and_are_listed(server: RunningServer) -> None:
    pids = {replica["pid"] for replica in _replicas(server)}
    assert pids == {engine.pid for engine in server.engines()} and len(pids) == 2
    assert [load["dp_rank"] for load in server.client.get("/get_load").json()] == [0, 1]
    for _ in range(4):
        assert server.post("/generate", **_body(1)).status_code == 200
    states = server.client.get("/get_server_info").json()["internal_states"]
    assert len(states) == 2 and all(state["num_steps"] > 0 for state in states)
    assert server.client.get("/v1/loads", params={"dp_rank": 1}).json()["loads"][0]["dp_rank"] == 1
    assert server.client.get("/v1/loads", params={"dp_rank": 2}).status_code == 400
    assert "num_requests_total" in server.client.get("/metrics").text
    assert server.post("/flush_cache").status_code == 200


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_one_held_goes_on_with_the_other_at_once(
    server: RunningServer, blow: signal.Signals
) -> None:
    _until_both(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
        want = await _answers(client)
        await client.post("/slow_down", json={"forward_sleep_time": 0.1})
        running = asyncio.create_task(_answers(client))
        while min(load["num_reqs"] for load in (await client.get("/get_load")).json()) < 1:
            await asyncio.sleep(0.02)
        known = {engine.pid for engine in server.engines()}
        victim = _replicas(server)[0]["pid"]
        psutil.Process(victim).send_signal(blow)
        if blow == signal.SIGKILL:
            while not (fresh := [e for e in server.engines() if e.pid not in known]):
                await asyncio.sleep(0.01)
            fresh[0].suspend()  # the restart takes longer than the answer
            assert (await client.get("/ready")).status_code == 200, "the other one serves"
            await client.post("/slow_down", json={"forward_sleep_time": 0})
            one = await client.post("/generate", json=_body(0))
            assert one.json()["output_ids"] == want[0]
            assert not _replicas(server)[0]["is_ready"], "it was served before the restart"
            fresh[0].resume()
        assert await running == want
        _until_both(server)
        assert _replicas(server)[0]["pid"] != victim
        await client.post("/slow_down", json={"forward_sleep_time": 0})
        assert await _answers(client) == want
    info = server.client.get("/get_server_info").json()["internal_states"]
    assert all(state["num_breaches"] == 0 for state in info)


@pytest.mark.slow
def test_one_that_dies_too_often_goes_without_the_other() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer(*FLAGS, "--max-engine-restarts", "0", model=model) as server:
        _until_both(server)
        server.engines()[0].kill()
        until_s = time.monotonic() + 60
        while not any("gone for good" in line for line in server.log):
            assert time.monotonic() < until_s, server.log
            time.sleep(0.05)
        assert server.post("/generate", **_body(0)).status_code == 200
        assert server.client.get("/ready").status_code == 200
        server.engines()[0].kill()
        assert server.process.wait(120) == 2
