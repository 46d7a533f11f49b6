"""Weights that change under many streams, and engines that die meanwhile: `make update-chaos` runs
the long form."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixlm import Engine
from tests.end_to_end.server import RunningServer
from tests.fakes.perturbed import perturbed
from tests.fakes.tiny_checkpoint import cached_tiny

NUM_UPDATES = int(os.environ.get("CHAOS_UPDATES", "6"))
NUM_STREAMS = 32
LIMIT_S = 120.0
MODES = ("wait", "retract", "in_place")
OPTIONS: dict[str, Any] = {
    "cpu_threads": 1,
    "max_total_tokens": 4096,
    "context_length": 128,
    "log_level": "error",
    "skip_tokenizer_init": True,
}
FLAGS = ("--max-total-tokens", "8192", "--context-length", "128", "--weight-version", "0")


def body(seed: int, new: int = 24) -> dict[str, Any]:
    ids = [(seed * 7 + i * 13) % 240 + 5 for i in range(8 + seed % 20)]
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "temperature": 0},
        "return_logprob": True,
    }


PROBES = [body(seed) for seed in range(4)]


def facts(answer: dict[str, Any]) -> Any:
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    old = cached_tiny("Qwen3ForCausalLM")
    return [old, perturbed(old, tmp_path_factory.mktemp("weights") / "new")]


@pytest.fixture(scope="module")
def wanted(folders: list[Path]) -> list[Any]:
    """The answers of fresh engines."""
    found = []
    for folder in folders:
        with Engine(model_path=str(folder), **OPTIONS) as engine:
            found.append([facts(engine.generate(**probe)) for probe in PROBES])
    assert found[0] != found[1]
    return found


@pytest.fixture
def server(folders: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(*FLAGS, model=str(folders[0])) as running:
        yield running


def probe(server: RunningServer) -> list[Any]:
    return [facts(server.post("/generate", **one).json()) for one in PROBES]


async def _stream(client: httpx.AsyncClient, seeds: Iterator[int], stop: asyncio.Event) -> int:
    """One answer after the other; how many."""
    count = 0
    while not stop.is_set():
        seed = next(seeds)
        answer = await client.post("/generate", json=body(seed, 8 + seed % 40))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["meta_info"]["finish_reason"]["type"] == "length"
        assert len(found["output_ids"]) == 8 + seed % 40
        count += 1
    return count


async def _updates(client: httpx.AsyncClient, folders: list[Path]) -> None:
    draw = random.Random(1)
    for number in range(1, NUM_UPDATES + 1):
        answer = await client.post(
            "/update_weights_from_disk",
            json={
                "model_path": str(folders[number % 2]),
                "weight_version": str(number),
                "mode": draw.choice(MODES),
            },
        )
        assert answer.status_code == 200 and answer.json()["success"], answer.text


def test_no_request_fails(server: RunningServer, folders: list[Path], wanted: list[Any]) -> None:
    """Updates of all modes under streams; then the answers are those of a fresh engine, and the
    engine is as large as after the first half of them."""

    async def run() -> int:
        stop, seeds = asyncio.Event(), iter(range(1 << 30))
        limits = httpx.Limits(max_connections=NUM_STREAMS + 2)
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as client:
            streams = [
                asyncio.create_task(_stream(client, seeds, stop)) for _ in range(NUM_STREAMS)
            ]
            try:
                await _updates(client, folders)
            finally:
                stop.set()
                counts = await asyncio.gather(*streams)
        return sum(counts)

    asyncio.run(run())
    before = server.engine().memory_info().rss
    assert asyncio.run(run()) >= NUM_STREAMS
    grown = server.engine().memory_info().rss - before
    assert grown < 16 << 20, f"{NUM_UPDATES} updates have left {grown >> 20} MB"
    assert probe(server) == wanted[NUM_UPDATES % 2]
    assert server.info()["num_breaches"] == 0


def test_a_kill_before_the_exchange_leaves_a_stream_the_old_weights(
    server: RunningServer, folders: list[Path], wanted: list[Any]
) -> None:
    """The update waits for a stream when the engine dies: the stream goes on with the old weights,
    as the next engine serves them, and then that engine gets the new ones."""
    server.post("/slow_down", forward_sleep_time=0.02)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(server.post, "/generate", **body(3, 100))
        server.wait_for(lambda: server.info()["num_running_reqs"] == 1)
        fields = {"model_path": str(folders[1]), "weight_version": "1"}
        update = pool.submit(server.post, "/update_weights_from_disk", **fields)
        prepared = "are ready beside those that are served"
        server.wait_for(lambda: any(prepared in line for line in server.log))
        server.engine().kill()
        answer = stream.result(LIMIT_S).json()
        assert update.result(LIMIT_S).json()["success"]
    assert answer["meta_info"]["weight_version"] == "0" and len(answer["output_ids"]) == 100
    assert server.client.get("/get_weight_version").json() == {"weight_version": "1"}
    with Engine(model_path=str(folders[0]), **OPTIONS) as engine:
        assert facts(engine.generate(**body(3, 100)))[0] == answer["output_ids"]
    assert probe(server) == wanted[1]


def test_a_kill_after_the_exchange_keeps_the_new_weights(
    server: RunningServer, folders: list[Path], wanted: list[Any]
) -> None:
    fields = {"model_path": str(folders[1]), "weight_version": "1"}
    assert server.post("/update_weights_from_disk", **fields).json()["success"]
    server.post("/slow_down", forward_sleep_time=0.02)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(server.post, "/generate", **PROBES[0])
        server.wait_for(lambda: server.info()["num_running_reqs"] == 1)
        server.engine().kill()
        answer = stream.result(LIMIT_S).json()
    assert facts(answer)[0] == wanted[1][0][0]
    assert answer["meta_info"]["weight_version"] == "1"
    assert probe(server) == wanted[1]
    assert any("serves the weights of version 1" in line for line in server.log)


def test_kills_at_any_moment(server: RunningServer, folders: list[Path], wanted: list[Any]) -> None:
    """Whatever moment of an update the engine dies at: what the label names is what is served."""
    draw = random.Random(2)
    for number in range(1, 4):
        version = str(number)
        place = number % 2
        fields = {"model_path": str(folders[place]), "weight_version": version}
        with ThreadPoolExecutor() as pool:
            update = pool.submit(server.post, "/update_weights_from_disk", **fields)
            server.process.poll()
            _spin(draw.randrange(40))
            server.engine().kill()
            is_ok = update.result(LIMIT_S).json().get("success", False)
        server.wait_ready()
        label = server.client.get("/get_weight_version").json()["weight_version"]
        if is_ok:
            assert label == version
        assert probe(server) == wanted[int(label) % 2]
        assert server.post("/update_weights_from_disk", **fields).json()["success"]


def _spin(rounds: int) -> None:
    """Let some time pass that differs from run to run."""
    for _ in range(rounds):
        sum(range(20_000))
