"""Requests that are sent before the answers to earlier ones are answered in turn."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.fakes.http_server import ScriptedServer, listening

from radixlm.entrypoints.http.uvicorn_protocol import MAX_HEADER_BYTES, Http

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def completion(prompt: str, max_tokens: int = 64) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "bad",
    [
        b"NONSENSE\r\n\r\n",
        b"\0\0\0",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (MAX_HEADER_BYTES + 1),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
    ids=["line", "bytes", "hosts", "size", "chunk"],
)
async def test_earlier_requests_are_answered_before_one_that_cannot_be_read(
    server: ScriptedServer, bad: bytes
) -> None:
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion("grüße") + PING + bad)
        await writer.drain()
        writer.write(PING)  # which is not read
        got = (await asyncio.wait_for(reader.read(), 30)).decode()
        writer.close()
    first, second, third = got.split("HTTP/1.1 ")[1:]
    assert first.startswith("200 ") and "Grüße 😀 aus Köln" in first
    assert second.startswith("200 ")
    assert third.startswith("400 ")


async def test_a_request_is_aborted_when_its_client_leaves_although_another_waits(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.http_server.SLOW_S", 0.1)
    server.engine.executor.is_slow = True
    requests = server.engine.intake.requests
    async with listening(server) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion("forever", 1500) + PING)
        async with asyncio.timeout(5):
            while not requests:
                await asyncio.sleep(0.001)
            writer.close()
            while requests:
                await asyncio.sleep(0.001)


async def test_a_request_without_memory_is_told_to_come_again(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    async with listening(server) as port:
        for place, says in (
            (f"{Http.__module__}.Http.on_body", "The server is out of memory."),
            ("radixlm.entrypoints.http.transport.body_bytes", "the server is out of memory"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, no_memory)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(PING + completion("grüße"))
                writer.write_eof()
                got = (await asyncio.wait_for(reader.read(), 30)).decode()
                writer.close()
            first, second = got.split("HTTP/1.1 ")[1:]
            assert first.startswith("200 ") and second.startswith("503 ")
            assert "retry-after: 1" in second.lower() and says in second
