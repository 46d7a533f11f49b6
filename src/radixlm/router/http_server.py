"""HTTP/1.1 for clients: connections with limits."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httptools

from radixlm.base.record import Record
from radixlm.entrypoints.http.descriptors import descriptor_limits
from radixlm.router.answer import Answer, error_answer
from radixlm.router.call import Call, Headers
from radixlm.router.client_stream import ClientStream

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_OTHER_BYTES = 5 * MAX_HEADER_BYTES  # of a request not yet complete, all but its body
MIN_BYTES_PER_S = 1000  # of a request, after the stall timeout
LARGE_BODY = 1 << 20  # from so many bytes on it counts against the limit of all together
LINGER_S = 2.0  # for what a client still sends after a refusal
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Limits(Record):
    """What a connection may ask for."""

    max_body_bytes: int = 512 << 20
    max_held_bytes: int = 4 << 30  # of all large bodies that came or come in, together
    stall_timeout_s: float = 60.0
    keep_alive_s: float = 75.0  # longer than clients and proxies keep idle connections


Serve = Callable[[Call, ClientStream], Awaitable[None]]


class HttpServer:
    """All connections of clients. ``serve`` answers one call; it is cancelled when the client
    leaves. A connection has one task for all its calls: one a call costs 4 us more."""

    def __init__(self, serve: Serve, limits: Limits) -> None:
        self.serve, self.limits = serve, limits
        self.connections: set[Connection] = set()
        self.is_draining = False  # each answer closes its connection
        self.num_held_bytes = 0  # of large bodies
        self._swept_s = time.monotonic()

    def make(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    @property
    def num_active(self) -> int:
        """Requests that have begun and are not answered."""
        return sum(c.is_busy for c in self.connections)

    def drain(self) -> None:
        """Close what is idle now, and the rest after its answer."""
        self.is_draining = True
        for connection in tuple(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        """Drop all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()

    def sweep(self) -> None:
        """Close connections whose clients stall, unless this process was itself suspended. To be
        called about once a second."""
        now_s = time.monotonic()
        was_suspended = now_s - self._swept_s > 10.0
        self._swept_s = now_s
        if was_suspended:
            return
        stalled = [c for c in self.connections if c.is_stalled(now_s)]
        for connection in stalled:
            connection.transport.abort()
        if stalled:
            log.warning("closed %d connections whose clients stalled", len(stalled))


class Connection(asyncio.Protocol):
    """One connection of a client. Its requests are answered in turn: what came too early waits."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.stream: ClientStream | None = None  # of the answer under way
        self.is_full = False
        self._peer = ""
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[Call, bool, bool]] = deque()  # call, is HTTP/1.1, is kept
        self._refusal: Answer | None = None  # nothing more is read
        self._is_upgrade = False
        self._raw_left = 0  # bytes of a body that the parser does not see
        self._is_paused = False
        self.is_lost = False
        self._next: tuple[Call, ClientStream] | None = None
        self._task: asyncio.Task[None] | None = None  # serves its calls
        self._wake: asyncio.Future[None] | None = None  # the task waits for a call
        self._num_fed = 0  # bytes that the parser has now
        self._since_s = time.monotonic()  # of idleness, of the request, or of the full buffer
        # of the request that comes
        self._is_reading = self._is_http11 = self._is_kept = False
        self._method, self._url, self._target = b"", b"", ""
        self._headers: Headers = []  # after the head: trailers
        self._call_headers: Headers = []
        self._named: dict[bytes, bytes] | None = None
        self._parts: list[bytes] = []
        self._num_received = self._num_body_bytes = 0
        self._num_held = 0  # bytes of large bodies that are not answered

    def is_stalled(self, now_s: float) -> bool:
        """Whether the client has sent or read too little for too long."""
        limits, age_s = self.server.limits, now_s - self._since_s
        if self.is_full:
            return age_s > limits.stall_timeout_s
        if self._is_reading and not self._is_paused:
            return age_s > limits.stall_timeout_s + self._num_received / MIN_BYTES_PER_S
        return self.stream is None and age_s > limits.keep_alive_s

    @property
    def is_busy(self) -> bool:
        """Whether a request comes in or is answered."""
        return self.stream is not None or self._is_reading

    def close_if_idle(self) -> None:
        """Close where no request is under way."""
        if not self.is_busy:
            self.transport.close()

    # of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.server.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.fileno() > descriptor_limits()[0]:
                message = "no file descriptor is left for more connections: raise ulimit -n"
                self._refuse(error_answer(503, message, "overloaded", retry_after_s=1))
                transport.close()
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""

    def data_received(self, data: bytes) -> None:
        while data and self._refusal is None:
            if self._raw_left:
                try:
                    data = self._take_raw(data)
                except _Refused as refused:
                    self._refuse(refused.answer)
                    return
            self._num_fed, rest = len(data), b""
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as error:
                rest = data[error.args[0] :]
                self._go_on_without_upgrade()
            except httptools.HttpParserError as error:
                self._refuse_error(error)
            if self._is_reading:
                self._num_received += len(data) - len(rest)
                # a chunk of one byte takes six; the rest are extensions and trailers
                if self._num_received > MAX_OTHER_BYTES + 8 * self._num_body_bytes:
                    self._refuse(_too_large_head())
            data = rest

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.server.connections.discard(self)
        self._queue.clear()
        self._let_go()
        self._refusal = self._refusal or _too_large_head()  # anything: read no more
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.left()
            if self._task is not None:
                self._task.cancel()
        elif self._wake is not None:
            self._wake.cancel()

    def pause_writing(self) -> None:
        self.is_full, self._since_s = True, time.monotonic()
        if self.stream is not None:
            self.stream.pressed(True)

    def resume_writing(self) -> None:
        self.is_full, self._since_s = False, time.monotonic()
        if self.stream is not None:
            self.stream.pressed(False)

    # of the parser; what these raise ends in _refuse_error

    def on_message_begin(self) -> None:
        self._url, self._headers, self._parts = b"", [], []
        self._num_received = self._num_body_bytes = 0
        self._is_reading, self._since_s = True, time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._method = self._parser.get_method()
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _refused(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        self._is_http11, self._is_kept = version == "1.1", self._parser.should_keep_alive()
        url = self._url.decode("ascii")
        self._target = url if url[:1] == "/" and "#" not in url else _target(url)
        length = self._check_head()
        self._is_upgrade = self._parser.should_upgrade()
        self._raw_left = length if self._is_upgrade else 0

    def on_body(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self.server.limits.max_body_bytes:
            raise self._too_large()
        if self._num_body_bytes > LARGE_BODY:
            self._hold(len(data))
        self._parts.append(data)

    def _hold(self, count: int) -> None:
        server = self.server
        if server.num_held_bytes + count > server.limits.max_held_bytes:
            message = "the bodies of other requests fill the memory for them: try again later"
            answer = error_answer(503, message, "overloaded", retry_after_s=1)
            raise _Refused(answer)
        self._num_held += count
        server.num_held_bytes += count

    def _let_go(self) -> None:
        """No large body is left here."""
        self.server.num_held_bytes -= self._num_held
        self._num_held = 0

    # requests

    def _check_head(self) -> int:
        """Refuse what could be read in two ways, and what is too large. The body's length, 0 if
        it is not told."""
        headers = self._headers
        named = self._named = dict(headers)
        if len(headers) > MAX_HEADERS or (
            self._num_received + self._num_fed > MAX_HEADER_BYTES
            and len(self._url) + sum(len(n) + len(v) for n, v in headers) > MAX_HEADER_BYTES
        ):
            raise _Refused(_too_large_head())
        if b"host" not in named and self._is_http11:
            raise _refused(400, "no Host header: send one")
        if len(named) != len(headers):
            self._named = None
            for name in (b"host", b"transfer-encoding", b"expect"):
                if sum(one == name for one, _ in headers) > 1:
                    raise _refused(400, f"several headers {name.decode()}: send one")
        coding = named.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or not self._is_http11):
            raise _refused(501, f"Transfer-Encoding {coding[:40]!r}: use chunked")
        length = int(named.get(b"content-length", 0))
        if length > self.server.limits.max_body_bytes:
            raise self._too_large()
        expects = named.get(b"expect")
        if expects is not None and expects.lower() != b"100-continue":
            raise _refused(417, f"Expect {expects[:40]!r}: use 100-continue")
        if expects is not None and self._is_http11 and self.stream is None:
            self.transport.write(CONTINUE)
        self._call_headers, self._headers = headers, []  # what follows are trailers
        return length

    def _too_large(self) -> _Refused:
        limit = self.server.limits.max_body_bytes
        message = f"the body exceeds {limit} bytes (--max-payload-size)"
        return _refused(413, message, "payload_too_large")

    def _go_on_without_upgrade(self) -> None:
        """Clients offer HTTP/2 by an Upgrade header, which may be ignored. The parser stops there,
        before the body."""
        if any(name == b"transfer-encoding" for name, _ in self._call_headers):
            self._refuse(_refused(501, "Upgrade with a chunked body: leave Upgrade out").answer)
            return
        if self._method == b"CONNECT":
            self._refuse(_refused(405, "CONNECT is not supported").answer)
            return
        self._parser = httptools.HttpRequestParser(self)
        if not self._raw_left:
            self.on_message_complete()

    def _take_raw(self, data: bytes) -> bytes:
        """Take the body from ``data``; the rest of it."""
        body, rest = data[: self._raw_left], data[self._raw_left :]
        self._raw_left -= len(body)
        self._num_received += len(body)
        self.on_body(body)
        if not self._raw_left:
            self.on_message_complete()
        return rest

    def on_message_complete(self) -> None:
        if self._is_upgrade:  # the parser stops before the body
            self._is_upgrade = False
            return
        self._is_reading = False
        path, _, query = self._target.partition("?")
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        method, headers = self._method.decode(), self._call_headers
        call = Call(method, path, query, headers, body, self._peer, self._named)
        if self.stream is not None:
            self._queue.append((call, self._is_http11, self._is_kept))
            if not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()
            return
        self._serve(call, self._is_http11, self._is_kept)

    def _serve(self, call: Call, is_http11: bool, is_kept: bool) -> None:
        stream = self.stream = ClientStream(self, call, is_http11, is_kept)
        self._next = call, stream
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve_all())
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _serve_all(self) -> None:
        """Serve the calls of this connection in turn, until it is lost."""
        loop = asyncio.get_running_loop()
        while not self.is_lost:
            if self._next is None:
                self._wake = loop.create_future()
                await self._wake
                self._wake = None
            else:
                (call, stream), self._next = self._next, None
                await self.server.serve(call, stream)

    def answered(self, is_kept: bool) -> None:
        """The answer under way is complete."""
        self.stream = None
        self._since_s = time.monotonic()
        if self._num_held and not (self._queue or self._is_reading):
            self._let_go()
        if not is_kept:
            if self._refusal is None:
                self.transport.close()
            else:
                asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)
        elif self._queue:
            self._serve(*self._queue.popleft())
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._is_paused:
            self._is_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # refusals

    def _refuse_error(self, error: Exception) -> None:
        cause = error.__context__
        if isinstance(cause, _Refused):
            self._refuse(cause.answer)
            return
        if cause is not None and not isinstance(cause, ValueError):  # of numbers, URLs, ASCII
            log.error("reading a request failed", exc_info=cause)
        self._refuse(_refused(400, f"the request is not valid HTTP: {error}").answer)

    def _refuse(self, answer: Answer) -> None:
        """Answer once all before is answered, and close. What the client still sends is read and
        dropped for a while, since closing with unread data would take the answer away from it."""
        self._refusal = answer
        self._is_reading = False
        if self.stream is not None or self.transport.is_closing():
            return
        ClientStream(self, None, True, False).answer(answer)


def _target(url: str) -> str:
    """Path and query. A whole URL, as to a proxy, loses its host."""
    if not url.startswith(("/", "*")):
        parts = urlsplit(url)
        url = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return url.partition("#")[0]


class _Refused(Exception):
    """A request that is not served; the connection closes after ``answer``."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def _refused(status: int, message: str, code: str = "invalid_http") -> _Refused:
    return _Refused(error_answer(status, message, code))


def _too_large_head() -> Answer:
    message = f"more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them"
    return error_answer(431, message, "headers_too_large")
