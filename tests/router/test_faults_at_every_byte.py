"""Connections that end after any byte, on either side: clients get whole answers or a clear end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.client import Connection, Response, ask, exchange, until
from tests.router.conftest import StartWorkers
from tests.router.front import Front

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True, "max_tokens": 3}
TARGET = "/v1/chat/completions"
NUMBER = re.compile(rb"cmpl-\d+")


def steps(count: int, step: int) -> Iterator[int]:
    """Every ``step``-th position, and all of the first and last few."""
    chosen = {*range(0, count, step), *range(min(count, 4)), *range(max(count - 8, 0), count)}
    yield from sorted(chosen)


def keep_all(front: Front) -> None:
    """No worker loses its place, however often it fails."""
    front.gateway.health = SimpleNamespace(reported=lambda worker, outcome: None)


def plain(response: Response) -> bytes:
    """A body without the numbers that a mock worker counts up."""
    return NUMBER.sub(b"cmpl-", response.body)


async def size_of(url: str, body: Any) -> int:
    """Bytes of a mock worker's answer, as the gateway asks for it."""
    lines = "x-radixlm-journal: 1\r\n" if body.get("stream") else ""
    async with Connection(url) as connection:
        await connection.send("POST", TARGET, body, [("x-radixlm-journal", "1")] * bool(lines))
        data = b""
        while not (data.endswith((b"0\r\n\r\n", b"}")) and len(data) > 60):
            data += await asyncio.wait_for(connection.reader.read(1 << 16), 5)
    return len(data)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_lost_after_any_byte_is_not_noticed(
    start_workers: StartWorkers, is_stream: bool, is_reset: bool
) -> None:
    """The other worker answers, or goes on; the client gets the very bytes of a calm run."""
    bad, good = await start_workers(2, echo=False, pad=1)  # no fast path
    bad.worker_id = good.worker_id = "w"
    body = STREAM if is_stream else CHAT
    count = await size_of(good.url, body)
    async with Front([bad, good]) as front:
        keep_all(front)
        calm = [await front.chat(**body) for _ in range(2)]
        assert plain(calm[0]) == plain(calm[1])
        bad.faults.reset = is_reset
        num_cut = 0
        for position in steps(count, 1 if is_reset == is_stream else 9):
            bad.faults.cut_after = position
            bad.faults.cut_first = 1
            answers = [await front.chat(**body) for _ in range(2)]  # one of them begins at `bad`
            for answer in answers:
                assert answer.is_complete and answer.status == 200, position
                assert plain(answer) == plain(calm[0]), position
            num_cut += bad.faults.cut_first == 0
        assert num_cut > count / 20 and front.is_idle
        assert not is_stream or good.num_resumed > 0


async def test_a_stream_that_no_worker_can_go_on_with_ends_in_an_error(
    start_workers: StartWorkers,
) -> None:
    """Never a bare cut: an error event and [DONE] after whole events, wherever it is cut."""
    (worker,) = await start_workers(1, echo=False)
    worker.num_requests = 1000  # numbers of one length
    count = await size_of(worker.url, STREAM)
    async with Front([worker], disable_retries=True) as front:
        keep_all(front)
        front.workers[0].facts = {}  # of a server that is no RadixLM
        whole = await front.chat(**STREAM)
        for position in steps(count, 7):
            worker.faults.cut_after = position
            answer = await front.chat(**STREAM)
            assert answer.is_complete, position
            if position >= count - 7:  # after [DONE]
                assert plain(answer) == plain(whole), position
            elif answer.status == 200:
                *events, error, done = answer.events
                assert done == "[DONE]" and error["error"]["message"], position
                assert len(events) < len(whole.events)
                assert plain(whole).startswith(NUMBER.sub(b"cmpl-", answer.body[:20]))
            else:
                assert answer.status == 502 and answer.json["error"]["message"], position
        assert front.is_idle


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_after_any_byte_of_its_request(
    start_workers: StartWorkers, is_stream: bool
) -> None:
    """Nothing of it is left: no load, no ticket, no journal; the next request is served."""
    (worker,) = await start_workers(1, hang=True)
    async with Front([worker]) as front:
        body = b'{"model": "mock", "stream": %s}' % (b"true" if is_stream else b"false")
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        data = head % (TARGET.encode(), len(body)) + body
        for position in range(len(data) + 1):
            async with Connection(front.url) as connection:
                connection.writer.write(data[:position])
                if position == len(data):
                    await until(lambda: len(worker.seen) == 1)
        await until(lambda: front.is_idle and not worker.num_inflight)
        await until(lambda: not front.gateway.server.connections)
        assert len(worker.seen) == worker.num_left == 1
        worker.faults.hang = False
        assert (await front.chat(**CHAT)).status == 200


async def test_a_client_that_leaves_after_any_byte_of_its_answer(
    start_workers: StartWorkers,
) -> None:
    """The worker's connection is closed at once, and all is given back."""
    (worker,) = await start_workers(1, stall_after=0)
    count = await size_of((await start_workers(1))[0].url, STREAM)
    async with Front([worker]) as front:
        for number, position in enumerate(steps(count - 30, 11), 1):
            worker.faults.stall_after = position
            async with Connection(front.url) as connection:
                await connection.send("POST", TARGET, STREAM)
                await until(lambda n=number: len(worker.seen) == n)  # type: ignore[misc]
            await until(lambda n=number: worker.num_left == n)  # type: ignore[misc]
        await until(lambda: front.is_idle and not worker.num_inflight)


async def test_a_worker_that_dribbles_is_passed_on_byte_for_byte(
    start_workers: StartWorkers,
) -> None:
    """Events that arrive one byte at a time are whole events for the client."""
    (worker,) = await start_workers(1, bytes_per_s=1e5, echo=False)
    async with Front([worker]) as front:
        answer = Response()
        async with Connection(front.url) as connection:
            await connection.send("POST", TARGET, STREAM)
            async for part in connection.chunks(answer):
                assert part.endswith(b"\n\n")
        assert answer.text == "t0 t1 t2 " and answer.is_complete


async def test_a_request_that_kills_two_workers_fails_alone(start_workers: StartWorkers) -> None:
    """A third worker is not tried; requests beside it go on."""
    workers = await start_workers(3, echo=False)
    for worker in workers:
        worker.faults.gap_s = 0.002
    async with Front(workers) as front:
        others = [asyncio.create_task(front.chat(**STREAM | {"max_tokens": 30})) for _ in range(9)]
        fatal = '{"cut_after": 0}'
        answer = await ask(front.url, "POST", TARGET, STREAM, [("x-mock", fatal)])
        assert answer.status == 500 and answer.json["error"]["code"] == "request_lost_workers"
        for other in await asyncio.gather(*others):
            assert other.is_complete and other.events[-1] == "[DONE]"
        assert sum(b"x-mock" in dict(one.headers) for w in workers for one in w.seen) == 2


async def test_bytes_after_an_answer_reach_nobody(start_workers: StartWorkers) -> None:
    """A worker that says more than its answer loses the connection, not the next client's."""
    extra = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    (worker,) = await start_workers(1, raw=extra + extra)
    async with Front([worker]) as front:
        for _ in range(3):
            answer = await front.chat(**CHAT)
            assert (answer.status, answer.body) == (200, b"hello")
        worker.faults.raw = ""
        assert (await front.chat(**CHAT)).json["echo"] == CHAT
        rest = await exchange(front.url, b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", 0.05)
        assert rest.startswith(b"HTTP/1.1 404")
