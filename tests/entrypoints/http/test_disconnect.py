"""Clients that disconnect, over real sockets: their requests are aborted at once."""

from __future__ import annotations

import asyncio
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer, listening

from radixlm.base.errors import Aborted, InvalidRequest
from radixlm.entrypoints.http import progress
from radixlm.entrypoints.http.transport import cancel_on_disconnect

CHAT = "/v1/chat/completions"


async def connect(port: int, path: str, body: dict[str, Any], more: str = "") -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}{more}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def until(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.001)


def body_of(path: str, stream: bool) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "forever"}], "stream": stream}
    if path == "/generate":
        params = {"max_new_tokens": 1500}
        return {"text": "forever", "stream": stream, "sampling_params": params}
    return {"prompt": ["forever", "forever"], "stream": stream, "max_tokens": 1500}


@pytest.mark.parametrize("path", [CHAT, "/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(
    server: ScriptedServer, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the disconnect it would run for minutes
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.1)
    server.engine.executor.is_slow = True
    planner = server.engine.scheduler.planner
    async with listening(server) as port:
        reader, writer = await connect(port, path, body_of(path, stream))
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: planner.running)
        writer.close()
        await until(lambda: not server.engine.intake.requests)
        await until(lambda: not planner.running)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token(server: ScriptedServer, stream: bool) -> None:
    await server.post("/pause_generation", mode="in_place")
    async with listening(server) as port:
        _, writer = await connect(port, CHAT, body_of(CHAT, stream))
        await until(lambda: server.engine.intake.requests)
        writer.close()
        await until(lambda: not server.engine.intake.requests)
    await server.post("/continue_generation")


@pytest.mark.parametrize("path", [CHAT, "/generate"])
@pytest.mark.parametrize("reads", [True, False])
async def test_leaving_while_the_prompt_is_computed(
    server: ScriptedServer, path: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With X-Prefill-Progress the stream has begun then."""
    monkeypatch.setattr(progress, "EVERY_S", 0.001 if reads else 60)
    planner = server.engine.scheduler.planner
    await server.post("/pause_generation", mode="in_place")
    async with listening(server) as port:
        header = "X-Prefill-Progress: yes\r\n"
        reader, writer = await connect(port, path, body_of(path, True), header)
        await until(lambda: server.engine.intake.requests)
        if reads:
            assert b"200 OK" in await reader.readuntil(b": queued\n\n")
        writer.close()
        await until(lambda: not server.engine.intake.requests)
        await server.post("/continue_generation")
        await until(lambda: not planner.running and not server.engine.scheduler.queue)


async def test_work_that_fails_while_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise InvalidRequest("it was wrong all along")

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    request: Any = SimpleNamespace(receive=receive)
    with pytest.raises(Aborted):
        await cancel_on_disconnect(request, work())
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def test_headers_without_end_are_refused(server: ScriptedServer) -> None:
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\n" + b"x-fill: " + b"a" * 100_000 + b"\r\n\r\n")
        await writer.drain()
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_a_body_over_the_limit_is_413(toy_folder: Any) -> None:
    server = ScriptedServer(toy_folder, {}, max_request_bytes=1000)
    server.engine.start()
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"800\r\n" + b"x" * 0x800 + b"\r\n0\r\n\r\n")
        await writer.drain()
        assert b" 413 " in await reader.readline()
        writer.close()
    server.engine.stop()


async def test_several_host_headers_are_refused(server: ScriptedServer) -> None:
    """RFC 9112, section 3.2; one a request of a connection is right."""
    one = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for head, status in ((one, b"200"), (one, b"200"), (one + b"host: a\r\n", b"400")):
            writer.write(head + b"\r\n")
            assert (await reader.readline()).split()[1] == status
            await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"Invalid HTTP request received."
        writer.close()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("cut", [10, 150, 250, 400])
async def test_an_offer_of_http2_is_ignored(
    server: ScriptedServer, is_chunked: bool, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's client makes one with each call; the body comes as without it."""
    body = b'{"prompt": "' + b"a " * 100 + b'"}'
    framing = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    if is_chunked:
        framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    call = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + offer + framing
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    sent = call + health + call
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in (sent[:cut], sent[cut:]):
            writer.write(part)
            await asyncio.sleep(0)
        for expected in (b'"count":', b"", b'"count":'):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split()[0])
            assert b" 200 " in head and expected in await reader.readexactly(size)
        writer.close()
    assert "upgrade" not in caplog.text
