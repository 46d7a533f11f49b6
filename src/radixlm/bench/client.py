"""A small HTTP/1.1 client that takes little CPU time from the server on the same machine.

Each event of a stream goes from the socket straight to a callback, so no task wakes up for a
token. Connections are reused; a running request has its own.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from radixlm.base.errors import ConfigError, TransferError

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


class Connection(asyncio.Protocol):
    """One socket, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_used = False  # it served a request before
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Response] | None = None
        self._response = Response()
        self._body: list[bytes] = []
        self._on_event: OnEvent | None = None
        self._events: EventReader | None = None
        self._keeps_alive = False
        self._now_s = 0.0

    # ---- the socket ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an HTTP answer: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        has_length = {"content-length", "transfer-encoding"} & set(self._response.headers)
        if self._response.status and not has_length:
            self.on_message_complete()  # a body that ends with the connection
            self._keeps_alive = False
        self._fail(f"the server closed the connection ({exc or 'end of stream'})")

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(TransferError(message))

    # ---- the parser ------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._response.status = self._parser.get_status_code()
        kind = self._response.headers.get("content-type", "")
        if self._on_event is not None and kind.startswith("text/event-stream"):
            self._events = EventReader(self._on_event)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self._events is not None:
            self._events.feed(body, self._now_s)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._keeps_alive = self._parser.should_keep_alive()
        self._response.body = b"".join(self._body)
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    # ---- one exchange ----------------------------------------------------------------------

    @property
    def is_reusable(self) -> bool:
        """Whether the next request may use this connection."""
        return self.transport is not None and not self.transport.is_closing() and self._keeps_alive

    @property
    def has_answered(self) -> bool:
        """Whether the answer of the running exchange has begun."""
        return self._response.status != 0

    async def exchange(self, request: bytes, on_event: OnEvent | None) -> Response:
        """Send and read one answer. TransferError if the connection breaks."""
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._body, self._events = Response(), [], None
        self._on_event, self._keeps_alive = on_event, False
        self._done = asyncio.get_running_loop().create_future()
        if self.transport is None:
            raise TransferError("the connection is closed")
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self.is_used, self._done = True, None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpClient:
    """A client of one server. `headers` are sent with every request."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url!r}: expected http://HOST:PORT")
        self.base_url = base_url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        lines = {"Host": parts.netloc, "Content-Type": "application/json"} | dict(headers or {})
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []

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
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data
        while True:
            connection = await self._connection()
            is_reused = connection.is_used
            try:
                response = await connection.exchange(request, on_event)
            except TransferError:
                # the server closed an idle connection at the moment of its reuse
                if is_reused and not connection.has_answered:
                    continue
                raise
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return response

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise TransferError(
                f"no server answers at {self.base_url} ({error.strerror or error})"
            ) from error
        return connection

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
