"""The engine process dies, hangs or does not start: what clients and operators see."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radixlm.entrypoints import replay
from tests.end_to_end.server import RunningServer
from tests.fakes.tiny_checkpoint import cached_tiny

NEW = 60


def _body(seed: int, **fields: Any) -> dict[str, Any]:
    ids = [(seed * 7 + i * 13) % 240 + 5 for i in range(8 + seed % 20)]
    sampling = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
    if seed % 2:
        sampling |= {"temperature": 1.0, "sampling_seed": seed}
    return {"input_ids": ids, "sampling_params": sampling, **fields}


# two of them have windows that slide several times
BODIES = [_body(seed, streaming_window=24 * (seed > 3)) for seed in range(6)]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crashes") / "dumps"


@pytest.fixture(scope="module")
def server(dumps: Path) -> Iterator[RunningServer]:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    flags = ("--max-engine-restarts", "50", "--watchdog-timeout", "5")
    crashes = ("--crash-dump-folder", str(dumps))
    with RunningServer(*flags, *crashes, model=model) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: RunningServer) -> list[list[int]]:
    return [server.post("/generate", **body).json()["output_ids"] for body in BODIES]


class Crowd:
    """Streams that run slowly while a test breaks something."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.ids: dict[int, list[int]] = {}
        self.last: dict[int, dict[str, Any]] = {}

    async def follow(self, index: int) -> None:
        body = {**BODIES[index], "stream": True, "rid": f"crowd-{index}"}
        async with self.client.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.last[index] = json.loads(line[6:])
                    self.ids[index] = self.last[index].get("output_ids", [])

    async def until(self, count: int) -> None:
        """Wait until every stream has `count` tokens."""
        while min(len(self.ids.get(i, ())) for i in range(len(BODIES))) < count:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _crowd(server: RunningServer) -> AsyncIterator[Crowd]:
    """Leaving the context waits for the streams."""
    async with httpx.AsyncClient(base_url=server.url, timeout=400) as client:
        await client.post("/slow_down", json={"forward_sleep_time": 0.1})
        crowd = Crowd(client)
        async with asyncio.TaskGroup() as group:
            for index in range(len(BODIES)):
                group.create_task(crowd.follow(index))
            await asyncio.wait_for(crowd.until(3), 60)
            yield crowd
            # a new engine answers quickly, and an absent one gives a 503
            await client.post("/slow_down", json={"forward_sleep_time": 0})
        await client.post("/slow_down", json={"forward_sleep_time": 0})


def _check_idle(server: RunningServer) -> None:
    server.wait_ready()
    deadline_s = time.monotonic() + 60
    while (info := server.info())["num_running_reqs"] + info["num_waiting_reqs"]:
        assert time.monotonic() < deadline_s, info
        time.sleep(0.02)
    server.post("/flush_cache")
    assert server.info()["num_used_tokens"] == 0
    assert server.info()["num_breaches"] == 0


async def _until_engine(server: RunningServer, old: int) -> psutil.Process:
    """Wait for the process that replaces `old`."""
    async with asyncio.timeout(300):
        while True:
            for found in server.engines():
                if found.pid != old:
                    return found
            await asyncio.sleep(0.01)


async def test_two_deaths_in_a_row_the_second_while_starting(
    server: RunningServer, wanted: list[list[int]]
) -> None:
    async with _crowd(server) as crowd:
        first = server.engine()
        first.kill()
        second = await _until_engine(server, first.pid)
        second.suspend()  # it cannot serve before this check
        assert (await crowd.client.get("/ready")).status_code == 503
        assert (await crowd.client.get("/health")).status_code == 200
        refused = await crowd.client.post("/flush_cache")
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        second.kill()
        await _until_engine(server, second.pid)
    assert [crowd.ids[i] for i in range(len(BODIES))] == wanted
    _check_idle(server)


async def test_a_hung_engine_is_replaced(server: RunningServer, wanted: list[list[int]]) -> None:
    async with _crowd(server) as crowd:
        hung = server.engine()
        hung.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(_until_engine(server, hung.pid), 120)
    assert [crowd.ids[i] for i in range(len(BODIES))] == wanted
    assert any("no heartbeat" in line for line in server.log)
    _check_idle(server)


async def test_sigterm_to_the_engine_alone_changes_nothing(
    server: RunningServer, wanted: list[list[int]]
) -> None:
    """A service manager signals every process of the unit; the server must still drain."""
    async with _crowd(server) as crowd:
        engine = server.engine()
        engine.terminate()
    assert [crowd.ids[i] for i in range(len(BODIES))] == wanted
    assert server.engine().pid == engine.pid


async def test_aborted_while_there_is_no_engine(server: RunningServer) -> None:
    async with _crowd(server) as crowd:
        old = server.engine()
        old.kill()
        new = await _until_engine(server, old.pid)
        new.suspend()  # it cannot serve before the abort
        answer = await crowd.client.post("/abort_request", json={"rid": "crowd-0"})
        assert answer.json()["num_aborted"] == 1
        new.resume()
    kinds = [crowd.last[i]["meta_info"]["finish_reason"]["type"] for i in range(len(BODIES))]
    assert kinds == ["abort"] + ["length"] * (len(BODIES) - 1)
    _check_idle(server)


def test_names_that_the_engine_does_not_know_do_not_reach_it(server: RunningServer) -> None:
    engine = server.engine().pid
    for fields in (
        {"logit_processor": "nobody's"},
        {"input_ids": None, "input_embeds": [[0.5] * 3] * 4},
        {"sampling_params": {"n": 2, "sampling_seed": 2**63 - 1, "max_new_tokens": 2}},
        {"sampling_params": {"logit_bias": {"5": 1e308}, "max_new_tokens": 2}},
        {"sampling_params": {"temperature": 1e300, "max_new_tokens": 2}},
        {"sampling_params": {"min_new_tokens": 2**63 - 1, "max_new_tokens": None}},
        {"rid": "x" * 5000},
    ):
        body = {k: v for k, v in {**_body(1), **fields}.items() if v is not None}
        assert server.post("/generate", **body).status_code in (200, 400), fields
    assert server.engine().pid == engine


async def test_a_crash_dump_can_be_replayed(
    server: RunningServer, dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests that ran when the engine died are in a file, and give the same tokens again."""
    known = set(dumps.glob("*.jsonl"))
    async with _crowd(server) as crowd:
        server.engine().kill()
        async with asyncio.timeout(300):
            while len(fresh := set(dumps.glob("*.jsonl")) - known) < 1:
                await asyncio.sleep(0.02)
        assert crowd.ids
    header, records = replay.read_dump(str(fresh.pop()))
    crowded = [r for r in records if r["rid"].startswith("crowd-") and not r["finish_reason"]]
    assert len(crowded) == len(BODIES) and header["reason"] == "the engine died"
    assert all(len(r["output_ids"]) >= 3 for r in crowded)
    asked = server.post("/dump_requests").json()
    assert replay.main([asked["path"], "--url", server.url]) == 0
    assert ", 0 different, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_too_many_deaths_end_the_server() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer("--max-engine-restarts", "1", model=model) as server:
        server.post("/slow_down", forward_sleep_time=0.05)
        first = server.engine()
        first.kill()
        asyncio.run(_until_engine(server, first.pid))
        server.wait_ready()
        server.post("/slow_down", forward_sleep_time=0.05)
        body = {**_body(0), "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.engine().kill()
            rest = [line for line in lines if line]
        assert any("died 2 times" in line for line in rest), rest[-3:]
        assert server.process.wait(120) == 2
        server._reader.join(10)
        assert any("--max-engine-restarts is 1" in line for line in server.log)


def test_an_engine_that_refuses_ends_the_server() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", "--model-path", model]
    flags = ["--max-total-tokens", str(10**13)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=400)
    assert done.returncode == 2, done.stderr
    assert "lower --max-total-tokens to" in done.stderr
    assert "Traceback" not in done.stderr


def _fill_connections(server: RunningServer) -> list[socket.socket]:
    """Connections until the server refuses one, and ten more."""
    host, port = server.url.removeprefix("http://").split(":")
    kept: list[socket.socket] = []
    num_refused = 0
    while num_refused < 10:
        assert len(kept) < 200
        made = socket.create_connection((host, int(port)), timeout=30)
        made.settimeout(0.3)
        try:
            answer = made.recv(100)
        except TimeoutError:
            kept.append(made)
            continue
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in answer
        num_refused += 1
        made.close()
    return kept


def test_an_engine_that_dies_while_connections_hold_all_descriptors_is_replaced() -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    with RunningServer(model=model, max_descriptors=64) as server:
        wanted = server.post("/generate", **BODIES[0]).json()["output_ids"]
        kept = _fill_connections(server)
        try:
            server.engine().kill()
            deadline_s = time.monotonic() + 60
            while server.client.get("/ready").status_code == 200:
                assert time.monotonic() < deadline_s, "the death was not noticed"
            server.wait_ready()
            assert server.post("/generate", **BODIES[0]).json()["output_ids"] == wanted
        finally:
            for connection in kept:
                connection.close()
        assert server.terminate() == 0
        assert any("file descriptors are left" in line for line in server.log)


async def test_an_engine_that_verifies_drafts_dies(wanted: list[list[int]]) -> None:
    """Drafts are not part of a request: a new engine goes on behind the tokens that were sent."""
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    with RunningServer(*flags, model=str(cached_tiny("Qwen3ForCausalLM"))) as server:
        async with _crowd(server) as crowd:
            await asyncio.wait_for(crowd.until(8), 120)
            server.engine().kill()
        assert [crowd.ids[i] for i in range(len(BODIES))] == wanted
        assert any(one["meta_info"].get("spec_verify_ct") for one in crowd.last.values())
        _check_idle(server)
