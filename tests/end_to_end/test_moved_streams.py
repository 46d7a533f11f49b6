"""A worker is killed amid its streams: behind the gateway, clients notice nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer
from tests.fakes.cut_streams import blocks_of, timeless
from tests.router.processes import Process, gateway_process

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
# of the moment, and of what else was computed
VARYING = re.compile(rb'"(created|cached_tokens|(?:cache_read_)?input_tokens)":\d+')
STEP_S = 0.05  # so that each token is a block of its own
LIMIT_S = 100.0

SEA = [{"role": "user", "content": "Tell me of the sea."}]
SHAPE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
HOT: dict[str, Any] = {"temperature": 2.0, "max_tokens": 30}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SEA, "seed": 1, "frequency_penalty": 1.0} | HOT),
    ("/v1/chat/completions", {"messages": SEA, "seed": 2, "n": 2} | HOT),
    ("/v1/chat/completions",
     {"messages": SEA, "seed": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 20}),
    ("/v1/chat/completions",
     {"messages": SEA, "seed": 4, "tool_choice": "required",
      "tools": [{"type": "function", "function": {"name": "f", "parameters": SHAPE}}]} | HOT),
    ("/v1/completions", {"prompt": ["The sea", "A ship"], "seed": 5} | HOT),
    ("/generate", {"text": "The sea", "sampling_params":
     {"regex": "[a-z ]{20,40}", "temperature": 2.0, "sampling_seed": 6, "max_new_tokens": 30}}),
    ("/v1/messages", {"messages": SEA, "max_tokens": 30, "temperature": 0.0}),
    ("/v1/responses", {"input": "Tell me of the sea.", "seed": 7, "max_output_tokens": 30}),
]  # fmt: skip


class Cluster:
    """Two workers and the gateway before them."""

    def __init__(self) -> None:
        flags = ("--max-total-tokens", "8192", "--max-running-requests", "16")
        flags += ("--num-continuous-decode-steps", "1")  # events are compared one by one
        self.workers = [RunningServer(*flags) for _ in range(2)]
        urls = [worker.url for worker in self.workers]
        self.gateway: Process = gateway_process("--policy", "round_robin", "--worker-urls", *urls)
        for worker in self.workers:
            worker.post("/slow_down", forward_sleep_time=STEP_S)

    def kill(self, index: int) -> None:
        process = psutil.Process(self.workers[index].process.pid)
        for one in (process, *process.children(recursive=True)):
            one.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        self.gateway.kill()
        for worker in self.workers:
            worker.client.close()
            worker.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.stop()


async def run(cluster: Cluster, kills: bool) -> tuple[list[bytes], float]:
    """All streams at once; with ``kills``, a worker dies when each has some blocks. Their bytes,
    and the longest wait between two chunks after that."""
    got = [b""] * len(STREAMS)
    gap_s = killed_s = 0.0

    async def one(client: httpx.AsyncClient, index: int) -> None:
        nonlocal gap_s
        path, fields = STREAMS[index]
        headers = {"x-request-id": f"stream-{index}"}
        body = fields | {"stream": True}
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            last_s = time.monotonic()
            async for chunk in answer.aiter_raw():
                now_s = time.monotonic()
                if killed_s:
                    gap_s = max(gap_s, now_s - max(last_s, killed_s))
                last_s = now_s
                got[index] += chunk

    async with (
        asyncio.timeout(LIMIT_S),
        httpx.AsyncClient(base_url=cluster.gateway.url, timeout=LIMIT_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(len(STREAMS)):
            group.create_task(one(client, index))
        while kills and min(data.count(b"\n\n") for data in got) < 4:
            await asyncio.sleep(0.01)
        if kills:
            cluster.kill(0)
            killed_s = time.monotonic()
    return got, gap_s


def plain(data: bytes) -> list[bytes]:
    """Blocks that two runs have in common, those of several choices in a fixed order."""
    data = VARYING.sub(rb'"\1":0', timeless(data))
    data = re.sub(rb"resp_\w+|(msg|rs)_\w+|call_\w+", b"id", data)  # drawn anew in each run
    data = re.sub(rb"(-?\d+\.\d\d)\d*(e-?\d+)?", rb"\1", data)
    return sorted(blocks_of(data), key=lambda b: b'"index":1' in b)


async def test_a_killed_worker_costs_no_client_anything(cluster: Cluster) -> None:
    wanted, _ = await run(cluster, kills=False)
    got, gap_s = await run(cluster, kills=True)
    for index, (path, _) in enumerate(STREAMS):
        assert plain(got[index]) == plain(wanted[index]), path
    assert gap_s < 10  # 0.3 s where nothing else runs
