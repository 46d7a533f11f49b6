"""Dispatch before workers that are gone without a word, or that answer what nobody expects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.client import Connection, ask, until
from tests.router.conftest import StartWorkers
from tests.router.front import Front

STREAM = {"messages": [], "stream": True, "max_tokens": 30}


async def test_a_machine_that_is_gone_costs_no_request(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses no connection: packets to it are lost."""
    gone, good = await start_workers(2)
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def lost(make: Any, host: str, port: int, **options: Any) -> Any:
        if port == gone.port:
            await loop.create_future()
        return await connect(make, host, port, **options)

    async with Front([gone, good]) as front:
        monkeypatch.setattr(front.gateway.upstream, "_connect_timeout_s", 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", lost)
            assert [(await front.chat()).status for _ in range(2)] == [200, 200]
    assert set(front.outcomes(gone)) == {"unreachable"} and front.is_idle


@pytest.mark.parametrize("status", [202, 204, 302])
async def test_a_stream_does_not_go_on_with_another_answer(
    start_workers: StartWorkers, status: int
) -> None:
    slow, odd = await start_workers(2, gap_s=0.005)
    odd.faults.raw = (
        f"HTTP/1.1 {status} Odd\r\n" + "content-length: 0\r\n" * (status != 204) + "\r\n"
    )
    async with Front([slow, odd], disable_retries=True) as front:
        async with Connection(front.url) as connection:
            await connection.send("POST", "/v1/chat/completions", STREAM)
            await until(lambda: any(s.journal.num_blocks > 3 for s in front.workers[0].streams))
            (stream,) = front.workers[0].streams
            stream.move()
            answer = await connection.read()
    assert answer.is_complete and answer.body.endswith(b"data: [DONE]\n\n")
    assert f"answered {status}".encode() in answer.body
    assert front.outcomes(odd) == ["error"] and front.is_idle


@pytest.mark.parametrize("line", ["\n", "\r\n"])
async def test_a_cut_after_the_last_event_loses_nothing(
    start_workers: StartWorkers, line: str
) -> None:
    events = f"data: {{}}{line}{line}data: [DONE]{line}{line}"
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    raw = f"{head}{len(events):x}\r\n{events}\r\n"
    (worker,) = await start_workers(1, raw=raw, cut_after=len(raw))
    async with Front([worker]) as front:
        answer = await ask(front.url, "POST", "/v1/chat/completions", STREAM)
    assert answer.body == events.encode() and front.outcomes(worker) == ["ok"]


async def test_a_wait_in_the_queue_is_no_fault_of_a_worker(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1, latency_s=0.15)
    async with Front([worker], request_timeout_secs=1) as front:
        enter = front.ticket.enter

        async def late(call: Any) -> Any:
            call.arrival_s -= 10.0
            return await enter(call)

        front.ticket.enter = late  # type: ignore[method-assign]
        assert (await front.chat()).status == 200
    assert front.outcomes(worker) == ["ok"]


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key"])
async def test_a_clients_key_is_not_for_a_worker_with_its_own(
    start_workers: StartWorkers, name: str
) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        front.workers[0].api_key = "theirs"
        assert (await front.chat(headers=[(name, "Bearer mine")])).status == 200
        front.workers[0].api_key = None
        assert (await front.chat(headers=[(name, "Bearer mine")])).status == 200
    first, second = (seen.headers for seen in worker.seen)
    assert [v for _, v in first if b"mine" in v] == [] and (
        b"authorization",
        b"Bearer theirs",
    ) in first
    assert (name.lower().encode(), b"Bearer mine") in second
