"""The gateway's HTTP: limits, keep-alive, pipelining, hostile input, back-pressure, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import uvloop

from radixlm.base.record import replace
from radixlm.router.answer import Answer, json_answer
from radixlm.router.app import ClientStream, Gateway
from radixlm.router.call import Call
from radixlm.router.launch import bind
from radixlm.router.options import Options
from tests.router.mock_worker import MockWorker

HOP_BY_HOP = (b"connection", b"content-length", b"host", b"transfer-encoding", b"expect")


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    is_uvloop = request.param == "uvloop"
    return uvloop.EventLoopPolicy() if is_uvloop else asyncio.DefaultEventLoopPolicy()


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.router.http_server.LINGER_S", 0.01)


class Proxy:
    """A gateway that passes every call on to one worker, and the port that it listens on."""

    def __init__(self, worker: MockWorker | None, **options: Any) -> None:
        self.gateway = Gateway(replace(Options(), **options), parts=())
        self.worker = worker
        self.gateway.dispatch = self._dispatch
        self.gateway.add_data_route("/v1/chat/completions", "chat")
        self.gateway.routes.add("GET", "/health", _health, "open")
        self.gateway.routes.add("POST", "/echo", _echo, "open")
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]

    async def _dispatch(self, gateway: Gateway, call: Call, client: ClientStream) -> None:
        assert self.worker is not None
        headers = [one for one in call.headers if one[0] not in HOP_BY_HOP]
        exchange = await gateway.upstream.open(
            self.worker.url, "POST", call.path, headers, call.body, timeout_s=20
        )
        client.on_pressure(exchange.pause, exchange.resume)
        client.begin(exchange.status, [h for h in exchange.headers if h[0] not in HOP_BY_HOP])
        exchange.start(client.write)
        await exchange.wait()
        client.end()

    async def send(self, data: bytes) -> bytes:
        """All that is answered to ``data`` until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer


async def _health(call: Call) -> Answer:
    return Answer(body=b"OK", content_type="text/plain")


async def _echo(call: Call) -> Answer:
    return json_answer({"path": call.path, "query": call.query, "body": call.body.decode()})


@contextlib.asynccontextmanager
async def proxy(worker: MockWorker | None = None, **options: Any) -> AsyncIterator[Proxy]:
    running = Proxy(worker, **options)
    await running.gateway.start(running.sock)
    try:
        yield running
    finally:
        await asyncio.wait_for(running.gateway.stop(), 10)


def _bodies(answer: bytes) -> list[bytes]:
    """The bodies of answers with a content-length, and nothing left over."""
    bodies = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), head
        if head.startswith(b"HTTP/1.1 100"):
            answer = rest
            continue
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(lines[b"content-length"])
        bodies.append(rest[:length])
        answer = rest[length:]
    return bodies


def _post(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


CLOSE = "Connection: close"


async def test_answers_on_one_connection_in_order() -> None:
    """Pipelined requests, one with a chunked body, one to a whole URL."""
    chunked = (
        b"POST /echo?a=1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
    )
    get = b"GET http://other/health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    async with proxy() as running:
        bodies = _bodies(await running.send(_post("/echo", b"1") + chunked + get))
        assert [orjson.loads(body) for body in bodies[:2]] == [
            {"path": "/echo", "query": "", "body": "1"},
            {"path": "/echo", "query": "a=1", "body": "abcde"},
        ]
        assert bodies[2:] == [b"OK"]
        head = await running.send(b"HEAD /health HTTP/1.0\r\n\r\n")
        assert b"content-length: 2\r\n" in head and head.endswith(b"\r\n\r\n")
        kept = await running.send(
            b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /health HTTP/1.0\r\n\r\n"
        )
        assert _bodies(kept) == [b"OK", b"OK"] and b"connection: keep-alive" in kept


async def test_byte_by_byte() -> None:
    async with proxy() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for byte in _post("/echo", b"abc", CLOSE):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert orjson.loads(_bodies(answer)[0])["body"] == "abc"
        writer.close()


@pytest.mark.parametrize(
    "head, status",
    [
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: +3", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked", 501),
        (b"POST /echo HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked", 501),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked", 501),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\n folded: 1", 400),
        (b"POST /echo HTTP/1.1\nHost: a\nContent-Length: 0", 400),
        (b"GET /health HTTP/1.1", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        (b"GET /health HTTP/2.0\r\nHost: a", 505),
        (b"GET /he\x00alth HTTP/1.1\r\nHost: a", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: a", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a", 405),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: more", 417),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1001", 413),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: a" + b"\r\nX: y" * 300, 431),
        (b"nonsense", 400),
    ],
)
async def test_refuses_what_could_be_read_in_two_ways(head: bytes, status: int) -> None:
    """And answers nothing after: the bytes that follow are no request."""
    smuggled = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    first = _post("/echo", b"1")
    async with proxy(max_payload_size=1000) as running:
        answer = await running.send(first + head + b"\r\n\r\n" + smuggled)
        bodies = _bodies(answer)
        assert len(bodies) == 2 and orjson.loads(bodies[0])["body"] == "1"
        assert answer.count(b"HTTP/1.1 %d " % status) == 1
        assert orjson.loads(bodies[1])["error"]["message"]
        assert not running.gateway.server.connections


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"+1\r\na\r\n", b"1\r\nab\r\n", b"-1\r\n", b"f" * 20])
async def test_refuses_bad_chunks(chunk: bytes) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with proxy() as running:
        answer = await running.send(head + chunk + b"\r\n" + b"GET /health HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1


async def test_refuses_a_body_over_the_limit_while_it_comes() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with proxy(max_payload_size=1000) as running:
        answer = await running.send(head + (b"100\r\n" + b"x" * 256 + b"\r\n") * 4)
        assert answer.startswith(b"HTTP/1.1 413") and b"--max-payload-size" in answer


async def test_an_offer_to_upgrade_is_ignored() -> None:
    lines = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMA")
    async with proxy() as running:
        sent = _post("/echo", b"GET /health HTTP/1.1\r\n\r\n", *lines) + _post("/echo", b"", CLOSE)
        bodies = [orjson.loads(body)["body"] for body in _bodies(await running.send(sent))]
        assert bodies == ["GET /health HTTP/1.1\r\n\r\n", ""]


async def test_expect_100_continue() -> None:
    async with proxy() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head, _, body = _post("/echo", b"abc", CLOSE, "Expect: 100-continue").rpartition(b"\r\n")
        writer.write(head + b"\r\n")
        assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 100 Continue\r\n"
        writer.write(body)
        assert (
            orjson.loads(_bodies((await reader.read()).removeprefix(b"\r\n"))[0])["body"] == "abc"
        )
        writer.close()


async def test_unknown_routes_methods_and_preflight() -> None:
    async with proxy(cors_allowed_origins=("http://page",)) as running:
        answer = await running.send(b"GET /nope HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404") and b"x-request-id: req-" in answer
        answer = await running.send(_post("/health", b"", CLOSE))
        assert answer.startswith(b"HTTP/1.1 405") and b"use GET" in answer
        answer = await running.send(
            b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: a\r\nOrigin: http://page\r\n"
            b"Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"access-control-allow-origin: http://page\r\n" in answer


async def test_stalled_clients_are_closed() -> None:
    """Half a head, half a body, and nothing at all; one that only waits for its answer stays."""
    async with MockWorker() as worker, proxy(worker) as running:
        server = running.gateway.server
        worker.faults.hang = True
        sent = [b"POST /ec", _post("/echo", b"abc")[:-1], b"", _post("/v1/chat/completions", b"{}")]
        pairs = [await asyncio.open_connection("127.0.0.1", running.port) for _ in sent]
        for (_, writer), data in zip(pairs, sent, strict=True):
            writer.write(data)
        while len(server.connections) < len(sent) or not worker.num_inflight:
            await asyncio.sleep(0.001)
        for connection in server.connections:
            connection._since_s -= server.limits.stall_timeout_s + server.limits.keep_alive_s
        server.sweep()
        for reader, _ in pairs[:3]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
        assert len(server.connections) == 1
        for _, writer in pairs:
            writer.close()


def _chat(*lines: str, stream: bool = True) -> bytes:
    body = orjson.dumps({"model": "mock", "stream": stream, "messages": []})
    return _post("/v1/chat/completions", body, "Content-Type: application/json", *lines)


async def test_streams_pass_unchanged() -> None:
    async with MockWorker() as worker, proxy(worker) as running:
        answer = await running.send(_chat(CLOSE))
        direct = await _direct(worker)
        assert answer.count(b"data: ") == direct.count(b"data: ") > 2
        assert answer.endswith(b"0\r\n\r\n") and b"[DONE]" in answer
        assert b"[DONE]" in await running.send(_chat(CLOSE).replace(b"HTTP/1.1", b"HTTP/1.0"))


async def _direct(worker: MockWorker) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(_chat())
    answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
    writer.close()
    return answer


async def test_a_client_that_leaves_closes_its_stream() -> None:
    async with MockWorker() as worker, proxy(worker) as running:
        worker.faults.hang = True
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(_chat())
        while not worker.num_inflight:
            await asyncio.sleep(0.001)
        writer.close()
        while not worker.num_left:
            await asyncio.sleep(0.001)
        assert not running.gateway.server.num_active


async def test_a_slow_reader_stops_its_worker() -> None:
    """What waits at the gateway is bounded; all arrives once the client reads."""
    num_bytes = 32 << 20
    async with _flood(num_bytes) as worker, proxy(worker) as running:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", running.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        writer.write(_chat(CLOSE))
        server = running.gateway.server
        while not any(c.is_full for c in server.connections):
            await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0)
        (connection,) = server.connections
        assert connection.transport.get_write_buffer_size() < 1 << 20
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.count(b"x") >= num_bytes and answer.endswith(b"0\r\n\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def _flood(num_bytes: int) -> AsyncIterator[Any]:
    """A worker that answers at once with so many bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % num_bytes)
        with contextlib.suppress(ConnectionError):
            for _ in range(num_bytes >> 16):
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    worker = MockWorker()
    worker.port = server.sockets[0].getsockname()[1]
    yield worker
    server.close()


async def test_drain_answers_a_request_that_has_begun() -> None:
    async with proxy() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        data = _post("/echo", b"abc")
        writer.write(data[:-1])
        while not running.gateway.server.num_active:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(running.gateway.drain(10))
        await asyncio.sleep(0)
        writer.write(data[-1:])
        answer = await asyncio.wait_for(reader.read(), 10)
        assert await draining and b"connection: close" in answer
        assert orjson.loads(_bodies(answer)[0])["body"] == "abc"
        writer.close()


async def test_drain_ends_streams_and_closes_the_rest() -> None:
    async with MockWorker() as worker, proxy(worker) as running:
        worker.faults.latency_s = 0.05
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", running.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(_chat())
        while not running.gateway.server.num_active:
            await asyncio.sleep(0.001)
        assert await running.gateway.drain(10)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b"[DONE]" in answer and b"connection: close" in answer
        assert await asyncio.wait_for(idle.read(), 10) == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", running.port)
        idle_writer.close()
        writer.close()
