"""Real servers whose engine is several processes: the tokens of one rank, and deaths."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from radixlm import Engine
from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

MODEL = str(cached_tiny("Qwen3ForCausalLM"))
FLAGS = (
    "--enable-metrics",
    "--rank-timeout-s",
    "2",
    "--max-total-tokens",
    "4096",
    "--max-engine-restarts",
    "1000",
)


def body(seed: int, new: int) -> dict[str, Any]:
    rng = random.Random(seed)
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))]
    sampling: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 0.9, "sampling_seed": seed, "frequency_penalty": 0.3}
    fields = {"return_logprob": True, "logprob_start_len": 0} if seed % 3 == 0 else {}
    return {"input_ids": ids, "sampling_params": sampling, **fields}


BODIES = [body(seed, 100) for seed in range(8)]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    """What one rank answers, with its log-probabilities."""
    with Engine(model_path=MODEL, cpu_threads=1, max_total_tokens=4096) as engine:
        answers = [engine.generate(**one) for one in BODIES]
    return [shown(answer) for answer in answers]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--tp-size", "2", *FLAGS, model=MODEL) as server:
        yield server
        left = server.engines()
        assert server.terminate() == 0
        assert not psutil.wait_procs(left, 10)[1], "a rank has outlived its server"


def test_stacks_of_all_processes_stop_none_of_them(server: RunningServer) -> None:
    before = {engine.pid for engine in server.engines()}
    text = server.client.get("/debug/stacks").text
    for role in ("engine", r"rank\.1"):
        assert re.search(rf"== {role}, pid \d+ ==\n.*thread 0x", text, re.I), text[-2000:]
    assert {int(pid) for pid in re.findall(r"pid (\d+) ==", text)} == {
        server.process.pid, *before,
    }  # fmt: skip
    assert server.post("/generate", **BODIES[0]).is_success
    assert {engine.pid for engine in server.engines()} == before


def shown(answer: dict[str, Any]) -> Any:
    meta = answer["meta_info"]
    return answer["output_ids"], [
        meta.get(f"{kind}_token_logprobs") for kind in ("input", "output")
    ]


async def ask(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
        calls = [client.post("/generate", json=one) for one in bodies]
        answers = await asyncio.gather(*calls)
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return [shown(answer.json()) for answer in answers]


async def outlive(server: RunningServer, rank: int, signum: int, wanted: list[Any]) -> None:
    """Kill a rank while streams run: they have the tokens of ``wanted``, and no rank is left."""
    server.wait_ready()
    before = server.engines()
    server.post("/slow_down", forward_sleep_time=0.1)
    answers = asyncio.create_task(ask(server, BODIES))
    await server.until_running(1)
    os.kill(rank_process(server, rank).pid, signum)
    assert await answers == wanted
    _, alive = psutil.wait_procs(before, 5)
    assert not alive, "a rank has outlived its replica"


def rank_process(server: RunningServer, rank: int) -> psutil.Process:
    """Rank 0 is the server's child, the others are its children in their order."""
    (first,) = psutil.Process(server.process.pid).children()
    return ([first, *sorted(first.children(), key=lambda p: p.pid)])[rank]


async def test_two_ranks_give_the_bits_of_one(server: RunningServer, wanted: list[Any]) -> None:
    assert len(server.engines()) == 2
    assert [(await ask(server, [one]))[0] for one in BODIES] == wanted
    assert await ask(server, BODIES) == wanted  # prefix hits and a batch


def test_ranks_are_told_of(server: RunningServer) -> None:
    ranks = server.info()["memory_usage"]["ranks"]
    assert len(ranks) == 2 and len({rank["token_capacity"] for rank in ranks}) == 1
    assert all(rank["rss_bytes"] > 0 and rank["wait_seconds"] > 0 for rank in ranks)
    text = server.client.get("/metrics").text
    (waited,) = re.findall(r"^radixlm:rank_wait_seconds{.*} (\S+)$", text, re.MULTILINE)
    assert float(waited) >= sum(rank["wait_seconds"] for rank in ranks)


@pytest.mark.parametrize(
    ("rank", "signum"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),  # as a death by another signal
        (0, signal.SIGKILL),
        (1, signal.SIGSEGV),
        (1, signal.SIGSTOP),
    ],
)
async def test_streams_outlive_the_death_of_a_rank(
    server: RunningServer, wanted: list[Any], rank: int, signum: int
) -> None:
    await outlive(server, rank, signum, wanted)
    server.wait_ready()
    assert len(server.engines()) == 2
