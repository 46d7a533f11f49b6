"""Connections leave descriptors for the server itself."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.chaos.test_stalls import connect, serving
from tests.fakes.http_server import ScriptedServer

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.http import descriptors, listener, uvicorn_protocol
from radixlm.entrypoints.http.descriptors import descriptor_limits
from radixlm.entrypoints.http.listener import NO_DESCRIPTOR, Listener
from radixlm.entrypoints.http.server import listen


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    descriptor_limits.cache_clear()
    yield
    descriptor_limits.cache_clear()


@pytest.mark.parametrize(
    ("limits", "raised", "highest", "num_reserved"),
    [
        ((64, 64), None, 47, 16),
        ((1024, 4096), 4096, 3071, 1024),
        ((1024, 1 << 20), 65536, 61439, 4096),
        ((1024, resource.RLIM_INFINITY), 65536, 61439, 4096),
        ((1 << 20, 1 << 20), None, (1 << 20) - 4097, 4096),
    ],
)
def test_the_limit_is_raised_and_a_part_reserved(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    raised: int | None,
    highest: int,
    num_reserved: int,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda kind, to: calls.append(to))
    assert descriptor_limits() == (highest, num_reserved)
    assert calls == ([(raised, limits[1])] if raised else [])


def test_a_limit_that_leaves_none_for_connections_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: (64, 64))
    listen(ServerConfig().with_values({"port": 0})).close()
    descriptor_limits.cache_clear()
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: (40, 40))
    with pytest.raises(ConfigError, match=r"ulimit -n 40 .*; ulimit -n 1024 works"):
        listen(ServerConfig().with_values({"port": 0}))


async def test_a_connection_with_a_reserved_descriptor_is_refused(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    highest = 1 << 20
    for module in (listener, uvicorn_protocol):
        monkeypatch.setattr(module, "descriptor_limits", lambda: (highest, 16))
    async with serving(server) as (running, port):
        reader, writer = await connect(port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        highest = 0
        refused, refused_writer = await connect(port)
        answer = await refused.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer
        running.sweep(running._swept_s)
        assert "refused 1 connections: only 16 file descriptors are left" in caplog.text
        assert uvicorn_protocol.Http.num_refused == 0
        for each in (writer, refused_writer):
            each.close()
            await each.wait_closed()


class _Read(asyncio.Protocol):
    """A connection that is served: it gets one byte."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"+")
        transport.close()


async def test_a_refused_client_reads_its_answer_whatever_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All have sent more than the head of a request before the first is looked at: closing such a
    connection at once would reset it."""
    monkeypatch.setattr(listener, "descriptor_limits", lambda: (0, 16))
    sock, loop = socket.create_server(("127.0.0.1", 0), backlog=64), asyncio.get_running_loop()
    clients = [socket.create_connection(sock.getsockname()) for _ in range(40)]
    for client in clients:
        client.setblocking(False)
        client.send(b"POST /generate HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + b"x" * 5000)
    refused: list[int] = []
    opened = Listener(sock, _Read, on_refused=lambda: refused.append(1))

    async def answer_of(client: socket.socket) -> bytes:
        found = await loop.sock_recv(client, 1 << 16)
        await loop.sock_sendall(client, b"x" * 4000)  # the rest
        with client:
            assert await loop.sock_recv(client, 1) == b""
        return found

    async with asyncio.timeout(60):
        found = await asyncio.gather(*map(answer_of, clients))
    opened.close()
    assert set(found) == {NO_DESCRIPTOR} and len(refused) == len(clients)


async def test_refused_clients_hold_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stay connected: further ones wait in the system, and are served once there is
    room again."""
    highest = 0
    monkeypatch.setattr(listener, "descriptor_limits", lambda: (highest, 16))
    monkeypatch.setattr(listener, "LINGER_S", 1e6)
    sock, loop = socket.create_server(("127.0.0.1", 0), backlog=64), asyncio.get_running_loop()
    clients = [socket.create_connection(sock.getsockname()) for _ in range(6)]
    refused: list[int] = []
    opened = Listener(sock, _Read, on_refused=lambda: refused.append(1))
    for client in clients:
        client.setblocking(False)
    async with asyncio.timeout(60):
        for client in clients[:4]:  # a quarter of what is reserved
            assert await loop.sock_recv(client, 1 << 16) == NO_DESCRIPTOR
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(refused) == 4
        highest = 1 << 20
        clients[0].close()
        for client in clients[4:]:
            assert await loop.sock_recv(client, 1) == b"+"
    opened.close()
    for client in clients:
        client.close()
    assert len(refused) == 4


async def test_a_system_without_descriptors_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REST_S", 0)
    sock, loop = socket.create_server(("127.0.0.1", 0)), asyncio.get_running_loop()
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    class Failing:
        """The socket, which fails to accept twice."""

        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

    opened = Listener(cast(Any, Failing()), _Read)
    with socket.create_connection(sock.getsockname()) as client:
        client.setblocking(False)
        async with asyncio.timeout(60):
            assert await loop.sock_recv(client, 1) == b"+"
    opened.close()
    assert not failures
