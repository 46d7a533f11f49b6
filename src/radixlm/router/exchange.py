"""One request to a worker and its answer, over a connection that is kept for the next one."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from radixlm.base.errors import ConfigError, TransferError
from radixlm.base.record import Record
from radixlm.router.call import Headers

Sink = Callable[[bytes], None]

MAX_HEADER_BYTES = 64 * 1024
MAX_WAITING_BYTES = 256 * 1024  # of a body that nobody takes yet


class WorkerFailure(TransferError):
    """A worker gave no whole answer. ``is_timeout``: it took too long. ``is_sent``: it had the
    request, or some of it."""

    def __init__(self, message: str, is_timeout: bool = False, *, is_sent: bool = False) -> None:
        super().__init__(message)
        self.is_timeout, self.is_sent = is_timeout, is_sent


class Unreachable(WorkerFailure):
    """No byte of an answer came."""


class NoDescriptor(Unreachable):
    """The gateway itself cannot open one more connection: no fault of the worker."""


class Cut(WorkerFailure):
    """The answer ended before its end."""


class Response(Record):
    """A whole answer of a worker."""

    status: int
    headers: Headers
    body: bytes


class Origin:
    """A worker's address and the connections that are kept for it, the newest last."""

    def __init__(self, url: str, context: ssl.SSLContext | None, max_idle: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"worker url {url!r}: use http://host:port or https://host:port")
        is_tls = parts.scheme == "https"
        self.url, self.host = url, parts.hostname
        self.port = parts.port or (443 if is_tls else 80)
        self.context = context if is_tls else None
        self.prefix = parts.path.rstrip("/").encode()
        self.host_line = b" HTTP/1.1\r\nhost: " + parts.netloc.rpartition("@")[2].encode()
        self.idle: list[Connection] = []
        self.max_idle = max_idle
        self.is_forgotten = False
        self.num_received = 0  # pieces of answers

    def message(self, method: str, target: str, headers: Headers, body: bytes) -> bytes:
        """Head and body of a request."""
        lines = [b"%b %b%b%b" % (method.encode(), self.prefix, target.encode(), self.host_line)]
        lines += map(b": ".join, headers)
        if body or method not in _BODILESS:
            lines.append(b"content-length: %d" % len(body))
        lines += (b"", body)
        return b"\r\n".join(lines)

    def take(self) -> Connection | None:
        """A kept connection that is still open."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None


_BODILESS = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))


class Exchange:
    """One request to a worker and its answer. ``status`` and ``headers`` are those of the head.
    The body goes to the sink, or is read whole; only one of the two."""

    __slots__ = (
        "_connection",
        "_done",
        "_is_complete",
        "_sink",
        "_under_way",
        "_waiting",
        "deadline_s",
        "error",
        "head",
        "headers",
        "is_head_request",
        "status",
        "url",
    )

    def __init__(
        self,
        connection: Connection,
        sink: Sink | None,
        is_head_request: bool,
        under_way: set[Exchange],
        deadline_s: float,
    ) -> None:
        """``deadline_s``: of time.monotonic. It is in ``under_way`` until its end."""
        self.status, self.url = 0, connection.origin.url
        self.headers: Headers = []
        self.is_head_request = is_head_request
        self._connection: Connection | None = connection
        self._sink = sink
        self._waiting: list[bytes] = []
        self.head: asyncio.Future[None] = connection.loop.create_future()
        self._done: asyncio.Future[None] | None = None
        self._under_way, self.deadline_s = under_way, deadline_s
        under_way.add(self)
        self.error: WorkerFailure | None = None
        self._is_complete = False

    def start(self, sink: Sink) -> None:
        """Give the body to ``sink``: what has come at once, the rest as it comes. ``sink`` must not
        raise."""
        self._sink = sink
        waiting, self._waiting = self._waiting, []
        self.resume()
        for data in waiting:
            sink(data)

    async def begun(self) -> None:
        """Until some of the body is here. Cut: it ended before."""
        if not self._waiting:
            await self.wait()

    async def wait(self) -> None:
        """Until the body is complete. Cut: it is not, or ``close`` was called."""
        if not self._is_complete and self.error is None:
            self._done = asyncio.get_running_loop().create_future()
            try:
                await self._done
            except asyncio.CancelledError:
                self.close()
                raise
        if self.error is not None:
            raise self.error

    async def read(self, limit: int) -> bytes:
        """The whole body. Cut: it ended early or is longer than ``limit`` bytes."""
        if self._is_complete and len(self._waiting) == 1 and len(self._waiting[0]) <= limit:
            return self._waiting[0]
        parts: list[bytes] = []
        num_bytes = 0

        def collect(data: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(data)
            if num_bytes > limit:
                self.close()
            else:
                parts.append(data)

        self.start(collect)
        try:
            await self.wait()
        except WorkerFailure:
            if num_bytes <= limit:
                raise
        if num_bytes > limit:
            raise Cut(f"{self.url}: answered more than {limit} bytes", is_sent=True)
        return b"".join(parts)

    def pause(self) -> None:
        """Read nothing more until ``resume``."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on after ``pause``."""
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """Drop the connection unless the answer is complete: the worker aborts the request."""
        if not self._is_complete:
            self.fail("the gateway closed the connection")

    def fail(self, reason: str, is_timeout: bool = False, *, is_cut: bool = False) -> None:
        """End with an error and drop the connection; nothing where the exchange has ended.
        ``is_cut``: as if an answer had begun, so that it is not asked again."""
        if self._is_complete or self.error is not None:
            return
        connection = self._connection
        is_begun = is_cut or self.status or (connection is not None and connection.is_begun)
        kind = Cut if is_begun else Unreachable
        self.error = kind(f"{self.url}: {reason}", is_timeout, is_sent=True)
        self._end()
        if connection is not None:
            connection.drop()

    def _end(self) -> None:
        """Wake who waits. The sink goes: it may hold this exchange."""
        self._connection = self._sink = None
        self._under_way.discard(self)
        if not self.head.done():
            self.head.set_result(None)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def on_head(self, status: int, headers: Headers) -> None:
        """The connection has read the head."""
        self.status, self.headers = status, headers
        if not self.head.done():
            self.head.set_result(None)

    def on_data(self, data: bytes) -> None:
        """The connection has read some of the body."""
        if self._sink is not None:
            self._sink(data)
            return
        self._waiting.append(data)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)  # of ``begun``
        waiting = self._waiting
        if len(waiting) > 1 and self._connection and sum(map(len, waiting)) > MAX_WAITING_BYTES:
            self._connection.pause()

    def on_complete(self) -> None:
        """The connection has read the whole body."""
        self._is_complete = True
        self._end()


class Connection(asyncio.Protocol):
    """One connection to a worker; it serves one exchange after the other."""

    transport: asyncio.Transport

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin, self.loop = origin, loop
        self.exchange: Exchange | None = None
        self.idle_since_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._is_paused = False
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._num_head_bytes = 0
        self.is_begun = self._has_head = self._is_complete = self._can_stay = False
        self._has_length = False  # else the body ends with the connection

    def send(self, message: bytes, exchange: Exchange) -> None:
        self._headers, self._num_head_bytes = [], 0
        self.is_begun = self._has_head = self._is_complete = self._can_stay = False
        self._has_length = False
        self.exchange = exchange
        self.transport.write(message)

    def pause(self) -> None:
        """Read nothing more."""
        if not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def keep_alive(self, idle_s: int) -> None:
        """Let TCP ask whether the worker is there, each ``idle_s`` seconds without a byte."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                if hasattr(socket, name):  # macOS has another name for the first
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), idle_s)

    def drop(self) -> None:
        """Close at once."""
        self.exchange = None
        self.transport.abort()

    # of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # an answer to no question
            self.transport.abort()
            return
        self.origin.num_received += 1
        if not self._has_head:
            self.is_begun = True
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._can_stay = False
            if not self._is_complete:
                exchange.fail(f"sent no valid HTTP ({error.__context__ or error})")
                return
        if self._parts:
            parts, self._parts = self._parts, []
            exchange.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._is_complete:
            self._finish()
        elif not self._has_head and self._num_head_bytes > MAX_HEADER_BYTES:
            exchange.fail(f"sent headers of more than {MAX_HEADER_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            if self in self.origin.idle:
                self.origin.idle.remove(self)
        elif self._has_head and not self._has_length and exc is None:
            exchange.on_complete()
        else:
            exchange.fail(f"closed the connection ({exc or 'end of stream'})")

    def _finish(self) -> None:
        exchange, self.exchange = self.exchange, None
        origin = self.origin
        has_room = len(origin.idle) < origin.max_idle and not origin.is_forgotten
        if self._can_stay and has_room and not self.transport.is_closing():
            if self._is_paused:
                self.resume()
            self.idle_since_s = time.monotonic()
            origin.idle.append(self)
        else:
            self.transport.close()
        if exchange is not None:
            exchange.on_complete()

    # of the parser

    def on_message_begin(self) -> None:
        if self._has_head:
            raise ValueError("bytes after the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            return  # a trailer
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._has_head = True
        exchange = self.exchange
        if exchange is None:
            return
        exchange.on_head(status, self._headers)
        if exchange.is_head_request:  # the parser would wait for a body
            self._is_complete = True

    def on_body(self, data: bytes) -> None:
        if not self._is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if not self._has_head:  # 100 Continue, 103 Early Hints
            self._headers = []
            return
        self._can_stay = not self._is_complete and self._parser.should_keep_alive()
        self._is_complete = True
