"""A worker is killed amid its streams: behind the gateway, clients notice nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import psutil
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer
from tests.fakes.cut_streams import timeless
from tests.router.processes import Process, gateway_process

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
# of the moment, and of what else was computed
VARYING = re.compile(rb'"(created|cached_tokens|(?:cache_read_)?input_tokens|sequence_number)":\d+')
TEXTS = ("content", "text", "arguments", "delta", "partial_json", "thinking", "reasoning_content")
STEP_S = 0.05  # so that a worker dies amid its streams
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
        flags += ("--num-continuous-decode-steps", "1")  # streams have many events
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
    ended: set[int] = set()
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
        ended.add(index)

    async with (
        asyncio.timeout(LIMIT_S),
        httpx.AsyncClient(base_url=cluster.gateway.url, timeout=LIMIT_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(len(STREAMS)):
            group.create_task(one(client, index))
        while kills and any(got[i].count(b"\n\n") < 4 and i not in ended for i in range(len(got))):
            await asyncio.sleep(0.01)
        if kills:
            assert len(ended) < len(STREAMS)
            cluster.kill(0)
            killed_s = time.monotonic()
    return got, gap_s


Key = tuple[Any, ...]


def events_of(data: bytes) -> list[Any]:
    """The values of a stream without what varies."""
    data = VARYING.sub(rb'"\1":0', timeless(data))
    data = re.sub(rb"resp_\w+|(msg|rs)_\w+|call_\w+", b"id", data)  # drawn anew in each run
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else orjson.loads(line) for line in lines]


def join(before: Any, after: Any, name: str = "") -> Any:
    """Two deltas as one."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {key: join(before.get(key), value, key) for key, value in after.items()}
    if isinstance(before, list) and isinstance(after, list):
        if name not in ("choices", "tool_calls"):
            return before + after
        rows = {one["index"]: one for one in before}
        rows |= {one["index"]: join(rows.get(one["index"]), one) for one in after}
        return list(rows.values())
    if isinstance(before, str) and isinstance(after, str) and name in TEXTS:
        return before + after
    return before if after is None else after


def joined(path: str, data: bytes) -> dict[Key, list[Any]]:
    """The events of each choice, those of one kind in a row as one: a step may make several tokens,
    and which of them share an event is a matter of time."""
    found: dict[Key, list[Any]] = {}
    kinds: dict[Key, Key] = {}
    for event in events_of(data):
        value = event if isinstance(event, dict) else {}
        choice: Key = tuple(one["index"] for one in value.get("choices", [value]) if "index" in one)
        kind = value.get("type"), tuple(value)
        rows = found.setdefault(choice, [])
        if not rows or kinds[choice] != kind:
            rows.append(event)
        else:
            rows[-1] = event if path == "/generate" else join(rows[-1], event)  # it tells all
        kinds[choice] = kind
    return found


def alike(one: Any, other: Any) -> bool:
    """Equal, numbers but for their last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) < 0.01
    return bool(one == other)


async def test_a_killed_worker_costs_no_client_anything(cluster: Cluster) -> None:
    wanted, _ = await run(cluster, kills=False)
    got, gap_s = await run(cluster, kills=True)
    for index, (path, _) in enumerate(STREAMS):
        ours, theirs = joined(path, got[index]), joined(path, wanted[index])
        assert alike(ours, theirs), (path, ours, theirs)
    assert gap_s < 10  # 0.3 s where nothing else runs
