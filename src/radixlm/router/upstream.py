"""Connections to workers: pooled, kept alive, without a task switch between a read and its sink."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import httptools

from radixlm.base.errors import ConfigError, TransferError
from radixlm.base.record import Record
from radixlm.router.call import Headers

Sink = Callable[[bytes], None]

CONNECT_TIMEOUT_S = 5.0
KEEP_IDLE_S = 50.0
MAX_IDLE = 500  # connections to a worker
TCP_KEEPALIVE_S = 30
TICK_S = 0.1
MAX_HEADER_BYTES = 64 * 1024
MAX_WAITING_BYTES = 256 * 1024  # of a body that nobody takes yet
MAX_CONTROL_BYTES = 64 << 20


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


class _Origin:
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
        self.idle: list[_Connection] = []
        self.max_idle = max_idle
        self.is_forgotten = False

    def message(self, method: str, target: str, headers: Headers, body: bytes) -> bytes:
        """Head and body of a request."""
        lines = [b"%b %b%b%b" % (method.encode(), self.prefix, target.encode(), self.host_line)]
        lines += map(b": ".join, headers)
        if body or method not in _BODILESS:
            lines.append(b"content-length: %d" % len(body))
        lines += (b"", body)
        return b"\r\n".join(lines)

    def take(self) -> _Connection | None:
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
        connection: _Connection,
        sink: Sink | None,
        is_head_request: bool,
        under_way: set[Exchange],
        deadline_s: float,
    ) -> None:
        """``deadline_s``: of time.monotonic. It is in ``under_way`` until its end."""
        self.status, self.url = 0, connection.origin.url
        self.headers: Headers = []
        self.is_head_request = is_head_request
        self._connection: _Connection | None = connection
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


class _Connection(asyncio.Protocol):
    """One connection to a worker; it serves one exchange after the other."""

    transport: asyncio.Transport

    def __init__(self, origin: _Origin, loop: asyncio.AbstractEventLoop) -> None:
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


class Upstream:
    """All connections to workers."""

    def __init__(
        self,
        *,
        ca_paths: Iterable[str] = (),
        cert_path: str | None = None,
        key_path: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keep_idle_s: float = KEEP_IDLE_S,
        max_idle: int = MAX_IDLE,
        tcp_keepalive_s: int = TCP_KEEPALIVE_S,
    ) -> None:
        """PEM files: authorities to trust besides the system's, and the gateway's own certificate.
        ``max_idle``: kept connections to each worker. ``tcp_keepalive_s``: 0, none. ConfigError: a
        file cannot be read."""
        self._connect_timeout_s, self._keep_idle_s = connect_timeout_s, keep_idle_s
        self._max_idle, self._tcp_keepalive_s = max_idle, tcp_keepalive_s
        self._tls = (tuple(ca_paths), cert_path, key_path)
        self._context = _client_context(*self._tls) if self._tls[0] or cert_path else None
        self._origins: dict[str, _Origin] = {}
        self._under_way: set[Exchange] = set()
        self._is_watching = False

    async def open(
        self,
        worker_url: str,
        method: str,
        target: str,
        headers: Headers,
        body: bytes = b"",
        *,
        sink: Sink | None = None,
        timeout_s: float,
    ) -> Exchange:
        """Send a request; returns after the head of the answer. ``target``: path and query.
        ``headers``: all but host and content-length, no hop-by-hop ones. ``timeout_s``: for the
        whole answer. Unreachable, Cut: it gave no head. A kept connection that was closed before
        any byte came is replaced by a fresh one."""
        origin = self._origins.get(worker_url) or self._origin(worker_url)
        message = origin.message(method, target, headers, body)
        deadline_s = time.monotonic() + timeout_s
        connection, error = origin.take(), None
        is_kept = connection is not None
        while True:
            if connection is None:
                try:
                    connection = await self._connect(origin, timeout_s)
                except Unreachable as refused:  # the worker has died since it had the request
                    raise error or refused from None
            exchange = Exchange(connection, sink, method == "HEAD", self._under_way, deadline_s)
            connection.send(message, exchange)
            if not self._is_watching:
                self._is_watching = True
                connection.loop.call_later(TICK_S, self._watch, connection.loop)
            try:
                await exchange.head
            except asyncio.CancelledError:
                exchange.close()
                raise
            error = exchange.error
            if error is None or exchange.status:
                return exchange
            if not is_kept or error.is_timeout or isinstance(error, Cut):
                raise error
            connection, is_kept = None, False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what has run out of time. One timer for all: one an exchange costs 2 us."""
        now_s = time.monotonic()
        for exchange in [one for one in self._under_way if one.deadline_s < now_s]:
            exchange.fail("no whole answer in time", is_timeout=True)
        self._is_watching = bool(self._under_way)
        if self._is_watching:
            loop.call_later(TICK_S, self._watch, loop)

    def abandon(self, worker_url: str) -> None:
        """End the exchanges with a worker that have no answer yet: it does not answer at all."""
        for exchange in [one for one in self._under_way if one.url == worker_url]:
            if not exchange.status:
                exchange.fail("its health checks fail", is_cut=True)

    async def fetch(
        self,
        url: str,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
        timeout_s: float,
        api_key: str | None = None,
    ) -> Response:
        """Ask and read the whole answer, of at most 64 MB. Unreachable, Cut as ``open``."""
        sent = list(headers)
        if api_key:
            sent.append((b"authorization", b"Bearer " + api_key.encode()))
        if body and not any(name == b"content-type" for name, _ in sent):
            sent.append((b"content-type", b"application/json"))
        exchange = await self.open(url, method, target, sent, body, timeout_s=timeout_s)
        content = await exchange.read(MAX_CONTROL_BYTES)
        return Response(exchange.status, exchange.headers, content)

    def sweep(self) -> None:
        """Close connections that have been idle for too long. To be called now and then."""
        now_s = time.monotonic()
        for origin in self._origins.values():
            for connection in origin.idle[:]:
                if now_s - connection.idle_since_s > self._keep_idle_s:
                    connection.transport.close()

    def forget(self, worker_url: str) -> None:
        """Close what is idle to a worker that has left."""
        origin = self._origins.pop(worker_url, None)
        if origin is not None:
            origin.is_forgotten = True
            for connection in origin.idle[:]:
                connection.transport.close()

    def close(self) -> None:
        """Close all idle connections."""
        for url in list(self._origins):
            self.forget(url)

    def _origin(self, url: str) -> _Origin:
        if url.startswith("https:") and self._context is None:
            self._context = _client_context(*self._tls)
        return self._origins.setdefault(url, _Origin(url, self._context, self._max_idle))

    async def _connect(self, origin: _Origin, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        limit_s = min(timeout_s, self._connect_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(origin, loop), origin.host, origin.port, ssl=origin.context
                )
        except TimeoutError:
            message = f"{origin.url}: no connection within {limit_s:g} s"
            raise Unreachable(message, limit_s == timeout_s) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                message = "no file descriptor is left for a connection to a worker: raise ulimit -n"
                raise NoDescriptor(message) from error
            raise Unreachable(f"{origin.url}: {error.strerror or error}") from error
        if self._tcp_keepalive_s:
            connection.keep_alive(self._tcp_keepalive_s)
        return connection


def _client_context(
    ca_paths: tuple[str, ...], cert_path: str | None, key_path: str | None
) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        for path in ca_paths:
            context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"--ca-cert-paths {path}: {error}") from error
    if cert_path:
        try:
            context.load_cert_chain(cert_path, key_path)
        except OSError as error:
            raise ConfigError(f"--client-cert-path {cert_path}: {error}") from error
    return context
