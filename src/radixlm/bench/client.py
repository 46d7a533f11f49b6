"""A small HTTP/1.1 client that takes little CPU time from the server on the same machine: the
gateway's, of JSON and events.

Each event of a stream goes from the socket straight to a callback, so no task wakes up for a
token. Connections are reused; a running request has its own.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from radixlm.base.errors import ConfigError, TransferError
from radixlm.router.exchange import Exchange, Unreachable
from radixlm.router.upstream import Upstream

# data of one event, and the time.perf_counter of its arrival
OnEvent = Callable[[bytes, float], None]


@dataclass(slots=True)
class Response:
    """An answer. `body` is empty if a stream went to the callback."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON, or None if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class EventReader:
    """Splits a byte stream into the data of server-sent events."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Call back with every event that `data` completes."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].lstrip(), now_s)
                continue
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._on_event(b"\n".join(lines), now_s)


class HttpClient:
    """A client of one server. `headers` are sent with every request."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url!r}: expected http://HOST:PORT")
        self.base_url = base_url.rstrip("/")
        lines = {"Content-Type": "application/json"} | dict(headers or {})
        self._headers = [(name.encode("latin-1"), v.encode("latin-1")) for name, v in lines.items()]
        self._upstream = Upstream(connect_timeout_s=math.inf)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        on_event: OnEvent | None = None,
    ) -> Response:
        """One request with a JSON body; the events of a stream go to ``on_event``.

        TransferError if no answer comes. Cancelling closes the connection.
        """
        data = b"" if body is None else orjson.dumps(body)
        parts: list[tuple[bytes, float]] = []
        try:
            exchange = await self._upstream.open(
                *(self.base_url, method, path, self._headers, data),
                sink=lambda data: parts.append((data, time.perf_counter())),
                timeout_s=math.inf,
            )
        except Unreachable as error:
            if error.is_sent:
                raise
            raise TransferError(f"no server answers at {error}") from error
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in exchange.headers}
        if on_event is not None and headers.get("content-type", "").startswith("text/event-stream"):
            await _read_events(exchange, parts, on_event)
            return Response(exchange.status, headers)
        await exchange.wait()
        return Response(exchange.status, headers, b"".join(data for data, _ in parts))

    def close(self) -> None:
        """Close all idle connections."""
        self._upstream.close()


async def _read_events(
    exchange: Exchange, parts: Iterable[tuple[bytes, float]], on_event: OnEvent
) -> None:
    """``parts``: of the stream, that have come already. TransferError if ``on_event`` fails."""
    reader, failures = EventReader(on_event), list[Exception]()

    def feed(data: bytes, now_s: float) -> None:
        try:
            reader.feed(data, now_s)
        except Exception as error:  # of an event that is not understood
            failures.append(error)
            exchange.close()

    for part in parts:
        feed(*part)
    exchange.start(lambda data: feed(data, time.perf_counter()))
    try:
        await exchange.wait()
    except TransferError:
        if not failures:
            raise
    if failures:
        message = f"{exchange.url}: an event is not understood: {failures[0]!r}"
        raise TransferError(message) from failures[0]
