"""Stalling clients over real sockets: the slot is freed and the connection closed. Slow clients
that make progress are served."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from radixlm.entrypoints.http.app import make_uvicorn
from radixlm.entrypoints.http.uvicorn_protocol import Server
from tests.fakes.http_server import ScriptedServer

LIMIT_S = 60.0  # default of --stall-timeout-s
STEP_S = 5.0
SMALL = 8192
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def message(num_tokens: int) -> bytes:
    params = {"max_new_tokens": num_tokens}
    body = json.dumps({"text": "forever", "stream": True, "sampling_params": params}).encode()
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[tuple[Server, int]]:
    """A server with small socket buffers, so that little unread data fills them."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    made = make_uvicorn(server.app, server.config)
    assert isinstance(made, Server)
    task = asyncio.create_task(made.serve(sockets=[sock]))
    async with asyncio.timeout(60):
        while not made.started:
            await asyncio.sleep(0)
    try:
        yield made, sock.getsockname()[1]
    finally:
        made.should_exit = True
        await task


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=1024)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.002)


def pass_time(made: Server, seconds: float) -> None:
    """Run the sweeps of `seconds` seconds at once."""
    now_s = time.monotonic()
    for step in range(int(seconds / STEP_S) + 1):
        made.sweep(now_s + step * STEP_S)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(60):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "sent", [b"", b"POST /gen", HEAD, message(5)[:-4]], ids=["nothing", "line", "head", "body"]
)
async def test_half_a_request_is_not_waited_for_without_end(
    server: ScriptedServer, sent: bytes
) -> None:
    async with serving(server) as (made, port):
        reader, writer = await connect(port)
        writer.write(sent)
        await until(lambda: len(made.server_state.connections) == 1)
        await asyncio.sleep(0)
        pass_time(made, LIMIT_S - 4 * STEP_S)  # plus the time that the machine itself needs
        assert made.server_state.connections
        pass_time(made, LIMIT_S + STEP_S)
        assert await is_closed(reader)
        await until(lambda: not made.server_state.connections)
        writer.close()


async def test_a_body_that_comes_slowly_is_waited_for(server: ScriptedServer) -> None:
    async with serving(server) as (made, port):
        reader, writer = await connect(port)
        whole = message(2)
        writer.write(whole[:-8])
        await until(lambda: len(made.server_state.connections) == 1)
        (connection,) = made.server_state.connections
        for at in range(len(whole) - 8, len(whole)):
            connection._awaits_since_s -= 50.0  # type: ignore[union-attr]
            before_s = connection._awaits_since_s  # type: ignore[union-attr]
            writer.write(whole[at : at + 1])
            await until(lambda b=before_s: connection._awaits_since_s != b)  # type: ignore
            made.sweep(time.monotonic())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_answer_that_nobody_reads_costs_slot_and_connection(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = server.engine.intake
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.001)
    server.engine.executor.is_slow = True  # each event is sent at once
    async with serving(server) as (made, port):
        reader, writer = await connect(port)
        writer.write(message(1500))
        await until(lambda: len(made.server_state.connections) == 1)
        (connection,) = made.server_state.connections
        await until(lambda: connection._unread_since_s > 0)  # type: ignore[union-attr]
        buffered = connection.transport.get_write_buffer_size()  # type: ignore[union-attr]
        assert buffered < 256 << 10
        pass_time(made, LIMIT_S + STEP_S)
        await until(lambda: not intake.requests and not made.server_state.connections)
        await until(lambda: not server.engine.scheduler.planner.running)
        assert await is_closed(reader)
        writer.close()


async def test_a_server_that_stood_still_blames_no_client(server: ScriptedServer) -> None:
    async with serving(server) as (made, port):
        _, writer = await connect(port)
        await until(lambda: len(made.server_state.connections) == 1)
        made.sweep(time.monotonic() + 1000)
        assert made.server_state.connections
        writer.close()
