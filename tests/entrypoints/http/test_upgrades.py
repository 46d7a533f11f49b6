"""Requests that offer another protocol, as those of Java's HTTP client, are served as they are."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from tests.fakes.http_server import ScriptedServer, listening

OFFER = (
    "Host: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Type: application/json\r\n"
)
BODY = json.dumps({"prompt": "grüße", "max_tokens": 64}).encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"


def head(line: str, *lines: str) -> bytes:
    return (f"{line} HTTP/1.1\r\n{OFFER}" + "".join(lines) + "\r\n").encode()


async def answers(port: int, *packets: bytes) -> str:
    """All that the server sends; it closes at the last request."""
    last = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for packet in (*packets[:-1], packets[-1] + last):
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0)
    data = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return data.decode()


@pytest.mark.parametrize(
    "packets",
    [
        (head("POST /v1/completions", LENGTH) + BODY,),
        (head("POST /v1/completions", LENGTH), BODY[:20], BODY[20:]),
        (head("POST /v1/completions", CHUNKED) + CHUNKS,),
        (head("POST /v1/completions", CHUNKED), CHUNKS[:7], CHUNKS[7:]),
        (2 * (head("POST /v1/completions", LENGTH) + BODY),),
    ],
)
async def test_the_body_of_a_request_that_offers_http2_is_read(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, packets: tuple[bytes, ...]
) -> None:
    caplog.set_level(logging.WARNING)
    async with listening(server) as port:
        got = await answers(port, *packets)
    asked = b"".join(packets).count(b"POST")
    assert got.count("200 OK") == asked + 1, got
    assert got.count("Grüße 😀 aus Köln") == asked
    assert not caplog.records


@pytest.mark.parametrize(
    ("lines", "status"),
    [(("GET /v1/models",), "200"), (("GET /v1/responses",), "405"),
     (("POST /v1/completions", "Content-Length: 0\r\n"), "400")],
)  # fmt: skip
async def test_a_request_without_a_body_is_answered(
    server: ScriptedServer, lines: tuple[str, ...], status: str
) -> None:
    async with listening(server) as port:
        got = await answers(port, head(*lines))
    assert got.startswith(f"HTTP/1.1 {status} ") and got.count("HTTP/1.1 200 OK") >= 1


async def test_a_body_is_not_read_as_a_request(server: ScriptedServer) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    packet = head("POST /v1/completions", f"Content-Length: {len(hidden)}\r\n") + hidden
    async with listening(server) as port:
        got = await answers(port, packet)
    assert got.startswith("HTTP/1.1 400 ") and got.count("HTTP/1.1 ") == 2
