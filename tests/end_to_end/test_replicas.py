"""--dp-size 2: two engine processes behind one server. One dies, hangs or exceeds its restarts."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from radixlm import Engine
from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

NUM_STREAMS = 8
MODEL = str(cached_tiny("Qwen3ForCausalLM"))
FLAGS = ("--dp-size", "2", "--max-total-tokens", "8192", "--watchdog-timeout", "3")


def _body(seed: int) -> dict[str, Any]:
    ids = [(seed * 7 + i * 13) % 240 + 5 for i in range(8 + seed)]
    sampling: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 1.0, "sampling_seed": seed}
    return {"input_ids": ids, "sampling_params": sampling}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = (*FLAGS, "--max-engine-restarts", "50", "--enable-metrics")
    with RunningServer(*flags, model=MODEL) as running:
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


def test_an_engine_inside_a_program_may_have_two() -> None:
    options = {"model_path": MODEL, "max_total_tokens": 4096, "cpu_threads": 1}
    bodies = [_body(seed) for seed in range(NUM_STREAMS)]
    with Engine(**options) as one:
        want = [one.generate(**body)["output_ids"] for body in bodies]
    before = set(psutil.Process().children(recursive=True))
    # the end of the engine ends what the threads wait for
    with ThreadPoolExecutor(4) as threads, Engine(**options, dp_size=2) as both:

        def ask(body: dict[str, Any]) -> list[int]:
            found: list[int] = both.generate(**body)["output_ids"]
            return found

        until_s = time.monotonic() + 120
        while len(both.get_server_info()["internal_states"]) < 2:
            assert time.monotonic() < until_s, "the second replica does not come"
            time.sleep(0.05)
        assert list(threads.map(ask, bodies)) == want
        states = both.get_server_info()["internal_states"]
        assert all(state["num_steps"] > 0 and state["num_breaches"] == 0 for state in states)
        assert both.flush_cache()
        children = set(psutil.Process().children(recursive=True)) - before
        engines = [child for child in children if "radixlm.engine.worker" in child.cmdline()]
        assert len(engines) == 2
        engines[0].kill()
        assert list(threads.map(ask, bodies)) == want
    assert not psutil.wait_procs(engines, 60)[1], "a process has outlived its engine"


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_one_held_goes_on_with_the_other_at_once(
    server: RunningServer, blow: signal.Signals
) -> None:
    _until_both(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
        want = await _answers(client)
        await client.post("/slow_down", json={"forward_sleep_time": 0.1})
        running = asyncio.create_task(_answers(client))
        async with asyncio.timeout(300):
            while min(load["num_reqs"] for load in (await client.get("/get_load")).json()) < 1:
                await asyncio.sleep(0.02)
        known = {engine.pid for engine in server.engines()}
        victim = _replicas(server)[0]["pid"]
        psutil.Process(victim).send_signal(blow)
        if blow == signal.SIGKILL:
            server.wait_for(lambda: {engine.pid for engine in server.engines()} - known)
            fresh = [engine for engine in server.engines() if engine.pid not in known]
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
    with RunningServer(*FLAGS, "--max-engine-restarts", "0", model=MODEL) as server:
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
