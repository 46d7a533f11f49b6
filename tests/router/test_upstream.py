"""Connections to workers: reuse, retries of kept ones, cuts, timeouts, answers of all forms."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from radixlm.base.errors import ConfigError
from radixlm.router.exchange import MAX_WAITING_BYTES, Cut, Unreachable
from radixlm.router.upstream import Upstream
from tests.router.conftest import StartWorkers
from tests.router.mock_worker import MockWorker

BODY = b'{"model": "mock", "messages": []}'


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    is_uvloop = request.param == "uvloop"
    return uvloop.EventLoopPolicy() if is_uvloop else asyncio.DefaultEventLoopPolicy()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    pool = Upstream()
    yield pool
    assert not pool._under_way
    pool.close()


async def _ask(upstream: Upstream, worker: MockWorker, timeout_s: float = 10.0) -> bytes:
    path = "/v1/chat/completions"
    answer = await upstream.fetch(worker.url, "POST", path, body=BODY, timeout_s=timeout_s)
    assert answer.status == 200
    return answer.body


async def test_connections_are_kept(upstream: Upstream, start_workers: StartWorkers) -> None:
    (worker,) = await start_workers()
    assert await _ask(upstream, worker) and await _ask(upstream, worker)
    assert len({seen.connection for seen in worker.seen}) == 1
    await asyncio.gather(*(_ask(upstream, worker) for _ in range(5)))
    assert len({seen.connection for seen in worker.seen}) == 5
    assert worker.seen[0].header(b"content-type") == b"application/json"
    assert worker.seen[0].body == BODY


async def test_a_kept_connection_that_was_closed_is_replaced(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    (worker,) = await start_workers(drop_kept=True)
    for _ in range(3):
        await _ask(upstream, worker)
    assert len({seen.connection for seen in worker.seen}) == len(worker.seen) - 2 == 3


async def test_a_fresh_connection_is_not_tried_again(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    (worker,) = await start_workers(cut_after=0)
    with pytest.raises(Unreachable):
        await _ask(upstream, worker)
    assert len(worker.seen) == 1


@pytest.mark.parametrize("cut_after", [1, 20, 150])
async def test_an_answer_that_ends_early(
    upstream: Upstream, start_workers: StartWorkers, cut_after: int
) -> None:
    (worker,) = await start_workers(cut_after=cut_after)
    with pytest.raises(Cut) as caught:
        await _ask(upstream, worker)
    assert caught.value.is_sent and not caught.value.is_timeout


async def test_nobody_listens(upstream: Upstream) -> None:
    worker = await MockWorker().start()
    await worker.kill()
    with pytest.raises(Unreachable, match=worker.url) as caught:
        await _ask(upstream, worker)
    assert not caught.value.is_sent


async def test_an_answer_that_takes_too_long(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    """No head; half a body."""
    (worker,) = await start_workers(hang=True)
    with pytest.raises(Unreachable) as caught:
        await _ask(upstream, worker, 0.05)
    assert caught.value.is_timeout
    worker.faults.hang, worker.faults.stall_after = False, 150
    with pytest.raises(Cut) as caught_later:
        await _ask(upstream, worker, 0.05)
    assert caught_later.value.is_timeout
    while worker.connections:
        await asyncio.sleep(0.001)


async def test_a_cancelled_question_drops_its_connection(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    (worker,) = await start_workers(hang=True)
    task = asyncio.ensure_future(_ask(upstream, worker))
    while not worker.num_inflight:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while worker.connections:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "raw, body",
    [
        ("HTTP/1.1 200 OK\r\n\r\nabc", b"abc"),
        ("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
        ("HTTP/1.1 204 No Content\r\n\r\n", b""),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nT: 1\r\n\r\n", b"a"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 500 no\r\n\r\n", b"a"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na", None),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
        ("SSH-2.0-OpenSSH\r\n", None),
        ("HTTP/1.1 200 OK\r\nX: " + "y" * 70_000, None),
    ],
)
async def test_forms_of_answers(upstream: Upstream, raw: str, body: bytes | None) -> None:
    """And what follows an answer is no part of the next one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(2):
        if body is None:
            with pytest.raises(Cut):
                await upstream.fetch(url, "GET", "/", timeout_s=10)
        else:
            assert (await upstream.fetch(url, "GET", "/", timeout_s=10)).body == body
    server.close()


async def test_head_has_no_body(upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert (await upstream.fetch(url, "HEAD", "/", timeout_s=10)).body == b""
    server.close()


async def test_bytes_that_come_before_the_sink(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    """They wait, and the worker is told to wait too."""
    (worker,) = await start_workers(pad=1 << 20)
    exchange = await upstream.open(worker.url, "POST", "/generate", [], BODY, timeout_s=10)
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert sum(map(len, exchange._waiting)) < 2 * MAX_WAITING_BYTES
    assert len(await exchange.read(1 << 22)) > 1 << 20


async def test_an_answer_over_the_limit(upstream: Upstream, start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(pad=1000)
    exchange = await upstream.open(worker.url, "POST", "/generate", [], BODY, timeout_s=10)
    with pytest.raises(Cut, match="more than 100 bytes"):
        await exchange.read(100)


async def test_idle_connections_are_swept_and_forgotten(
    upstream: Upstream, start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = await start_workers(2)
    for worker in workers:
        await _ask(upstream, worker)
    upstream.sweep()
    upstream.forget(workers[0].url)
    while workers[0].connections:
        await asyncio.sleep(0.001)
    assert workers[1].connections
    monkeypatch.setattr(upstream, "_keep_idle_s", -1.0)
    upstream.sweep()
    while workers[1].connections:
        await asyncio.sleep(0.001)


async def test_the_number_of_idle_connections_is_bounded(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    upstream = Upstream(max_idle=1, tcp_keepalive_s=7)
    both = [
        await upstream.open(worker.url, "POST", "/generate", [], b"{}", timeout_s=10)
        for _ in range(2)
    ]
    (origin,) = upstream._origins.values()
    for exchange in both:
        await exchange.read(1 << 20)
    assert len(origin.idle) == 1
    sock = origin.idle[0].transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
    upstream.close()


async def test_a_forgotten_worker_keeps_no_connection(
    upstream: Upstream, start_workers: StartWorkers
) -> None:
    (worker,) = await start_workers(gap_s=0.005)
    body = b'{"stream": true}'
    exchange = await upstream.open(worker.url, "POST", "/generate", [], body, timeout_s=10)
    assert upstream._under_way
    upstream.forget(worker.url)
    assert await exchange.read(1 << 20)
    async with asyncio.timeout(5):
        while worker.connections:
            await asyncio.sleep(0.001)


async def test_the_begin_of_an_answer_that_nobody_asked_for(upstream: Upstream) -> None:
    """What follows it must not be taken for the next answer."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 2")
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"00 OK\r\nContent-Length: 1\r\n\r\nb")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(2):
        assert (await upstream.fetch(url, "GET", "/", timeout_s=10)).body == b"a"
    assert num_connections == 2
    server.close()


@pytest.mark.parametrize("url", ["grpc://a:1", "127.0.0.1:30000", "http://"])
async def test_urls_that_cannot_be(upstream: Upstream, url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        await upstream.fetch(url, "GET", "/", timeout_s=1)
