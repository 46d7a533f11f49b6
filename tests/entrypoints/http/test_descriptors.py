"""Connections leave descriptors for the server itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest
from tests.chaos.test_stalls import connect, serving
from tests.fakes.http_server import ScriptedServer

from radixlm.entrypoints.http import descriptors, uvicorn_protocol
from radixlm.entrypoints.http.descriptors import backlog, descriptor_limits


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
    assert backlog() == num_reserved // 2


async def test_a_connection_with_a_reserved_descriptor_is_refused(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    highest = 1 << 20
    monkeypatch.setattr(uvicorn_protocol, "descriptor_limits", lambda: (highest, 16))
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
