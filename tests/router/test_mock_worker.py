"""The mock worker itself: what the other tests rely on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.client import Connection, ask, exchange, until
from tests.router.conftest import StartWorkers
from tests.router.processes import Process

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True, "max_tokens": 5}
TARGET = "/v1/chat/completions"


async def test_answers_and_streams_on_one_connection(start_workers: StartWorkers) -> None:
    """A kept connection serves plain answers and streams in turn, and requests are recorded."""
    (worker,) = await start_workers()
    async with Connection(worker.url) as connection:
        for _ in range(2):
            await connection.send("POST", TARGET, CHAT)
            answer = await connection.read()
            assert (answer.status, answer.json["echo"]) == (200, CHAT)
            await connection.send("POST", TARGET, STREAM)
            answer = await connection.read()
            assert answer.text == "t0 t1 t2 t3 t4 " and answer.events[-1] == "[DONE]"
    assert [one.target for one in worker.seen] == [TARGET] * 4
    assert worker.num_inflight == worker.num_left == 0


async def test_pipelined_requests_are_answered_in_order(start_workers: StartWorkers) -> None:
    """Three requests in one write get three answers, in order."""
    (worker,) = await start_workers()
    parts = [
        b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{"a":%d}' % i
        for i in range(3)
    ]
    answer = await exchange(worker.url, b"".join(parts), limit_s=0.2)
    assert re.findall(rb'"echo":\{"a":(\d)\}', answer) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("faults", "status", "is_complete"),
    [
        ({"status": 503, "retry_after": "3"}, 503, True),
        ({"fail_first": 1}, 500, True),
        ({"cut_after": 0}, 0, False),
        ({"cut_after": 200}, 200, False),
        ({"cut_after": 200, "reset": True}, 200, False),
        ({"html": True}, 200, True),
        ({"until_close": True}, 200, True),
        ({"raw": "HTTP/1.1 204 No\r\n\r\n"}, 204, True),
        ({"api_key": "k"}, 401, True),
        ({"bytes_per_s": 1e6}, 200, True),
        ({"crash": True}, 0, False),
    ],
)
async def test_faults(
    start_workers: StartWorkers, faults: dict[str, Any], status: int, is_complete: bool
) -> None:
    """Each fault does what it says."""
    (worker,) = await start_workers(1, **faults)
    answer = await ask(worker.url, "POST", TARGET, STREAM)
    assert (answer.status, answer.is_complete) == (status, is_complete)
    if faults.get("retry_after"):
        assert answer.header(b"retry-after") == b"3"
    if faults.get("bytes_per_s"):
        assert answer.text == "t0 t1 t2 t3 t4 "


@pytest.mark.parametrize("faults", [{"hang": True}, {"stall_after": 250}, {"is_deaf": True}])
async def test_faults_that_never_end(start_workers: StartWorkers, faults: dict[str, Any]) -> None:
    """A client gives up on them; the worker sees it leave where it reads at all."""
    (worker,) = await start_workers(1, **faults)
    with pytest.raises(TimeoutError):
        await ask(worker.url, "POST", TARGET, STREAM, limit_s=0.1)
    await until(lambda: worker.num_inflight == 0)
    assert worker.num_left == len(worker.seen)


async def test_a_journal_continues_on_another_worker(start_workers: StartWorkers) -> None:
    """The blocks of a cut stream and those of its continuation are the whole stream."""
    first, second = await start_workers(2, echo=False)
    mark = [("x-radixlm-journal", "1")]
    await ask(first.url, "POST", TARGET, STREAM)
    whole = await ask(first.url, "POST", TARGET, STREAM, mark)
    blocks = whole.body.split(b"\n\n")[:3]
    records = re.findall(rb": j (\S+)\n", b"\n\n".join(blocks))
    resume = {"journal": [one.decode() for one in records], "num_events": 3}
    rest = await ask(second.url, "POST", TARGET, {**STREAM, "resume": resume}, mark)
    assert (len(records), second.num_resumed) == (3, 1)
    joined = b"\n\n".join(blocks) + b"\n\n" + rest.body
    assert re.sub(rb": j \S+\n", b"", joined) == re.sub(rb": j \S+\n", b"", whole.body)


async def test_a_process_takes_flags_and_faults(start_mock: Callable[..., Process]) -> None:
    """The reference's flags, faults set while it runs, and a crash that ends the process."""
    process = start_mock("--latency-ms", "30", "--worker-id", "w", "--dp-size", "2")
    start_s = time.monotonic()
    answer = await ask(process.url, "POST", "/generate", {"text": "hi"})
    assert time.monotonic() - start_s >= 0.03 and answer.json["worker_id"] == "w"
    assert process.ask("/get_server_info")["dp_size"] == 2
    assert process.ask("/mock", {"crash": True})["num_requests"] == 1
    assert (await ask(process.url, "POST", "/generate", {"text": "hi"})).status == 0
    assert process.popen.wait(10) == 1
