"""A plain HTTP client for tests: it shows bytes, heads and ends of answers as they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

Headers = list[tuple[bytes, bytes]]
LIMIT_S = 20.0  # no wait of a test is longer


@dataclass
class Response:
    """An answer. ``is_complete``: it ended as its head said, not by a cut connection."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    is_complete: bool = False

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; ``name`` in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream: JSON of each, "[DONE]" as text."""
        blocks = self.body.decode().split("\n\n")
        lines = [line[6:] for block in blocks for line in block.split("\n") if line[:6] == "data: "]
        return [line if line == "[DONE]" else orjson.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """The texts of a chat stream or a stream of completions, joined."""
        texts = []
        for event in self.events:
            for choice in event.get("choices", []) if isinstance(event, dict) else []:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(texts)


class Connection:
    """One connection to a server; requests one after the other."""

    def __init__(self, url: str) -> None:
        """``url``: http://host:port."""
        place = urlsplit(url)
        self.host, self.port = place.hostname or "", place.port or 80

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    async def send(
        self, method: str, target: str, body: Any = b"", headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Write one request; a ``body`` that is no bytes becomes JSON."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        if data or method in ("POST", "PUT"):
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
        await self.writer.drain()

    async def chunks(self, response: Response, limit_s: float = LIMIT_S) -> AsyncIterator[bytes]:
        """The body's parts as they come; fills ``response`` meanwhile. Ends with the answer, or
        with the connection."""
        parts: list[bytes] = []
        callbacks = _Callbacks(response, parts)
        callbacks.parser = parser = httptools.HttpResponseParser(callbacks)
        async with asyncio.timeout(limit_s):
            while not response.is_complete:
                try:
                    data = await self.reader.read(1 << 16)
                except ConnectionError:
                    return
                if not data:
                    has_end = any(
                        key in (b"content-length", b"transfer-encoding")
                        for key, _ in response.headers
                    )
                    response.is_complete = bool(response.status) and not has_end
                    return
                parser.feed_data(data)
                response.body += b"".join(parts)
                for part in parts:
                    yield part
                parts.clear()

    async def read(self, limit_s: float = LIMIT_S) -> Response:
        """One answer; what came of it where the connection ended."""
        response = Response()
        async for _ in self.chunks(response, limit_s):
            pass
        return response


class _Callbacks:
    parser: httptools.HttpResponseParser

    def __init__(self, response: Response, parts: list[bytes]) -> None:
        self.response, self.parts = response, parts

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers.append((name.lower(), value))

    def on_status(self, _: bytes) -> None:
        self.response.headers.clear()  # of an answer 100 before

    def on_headers_complete(self) -> None:
        self.response.status = self.parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.response.is_complete = self.response.status >= 200


async def ask(
    url: str,
    method: str,
    target: str,
    body: Any = b"",
    headers: Iterable[tuple[str, str]] = (),
    limit_s: float = LIMIT_S,
) -> Response:
    """One request on a connection of its own."""
    async with asyncio.timeout(limit_s), Connection(url) as connection:
        await connection.send(method, target, body, headers)
        return await connection.read(limit_s)


async def exchange(url: str, data: bytes, limit_s: float = LIMIT_S) -> bytes:
    """All bytes that come back for ``data``, until the server closes or ``limit_s`` has passed."""
    answer = b""
    async with Connection(url) as connection:
        try:
            async with asyncio.timeout(limit_s):
                connection.writer.write(data)
                while part := await connection.reader.read(1 << 16):
                    answer += part
        except (TimeoutError, ConnectionError):
            pass
    return answer


async def until(is_so: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for something that another task of this loop, or another process, is about to do."""
    async with asyncio.timeout(limit_s):
        while not is_so():
            await asyncio.sleep(0.001)
