"""uvicorn's HTTP/1.1 protocol and server, with limits on headers and on stalled connections.

A connection whose client sends half a request, or does not read its answer, is closed after
--stall-timeout-s.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixlm.base.errors import InvalidRequest, PayloadTooLarge
from radixlm.entrypoints.http.descriptors import descriptor_limits
from radixlm.entrypoints.http.listener import NO_DESCRIPTOR, Listener

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
NO_MEMORY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 28\r\n\r\n"
    b"The server is out of memory."
)
FRAMING = (b"content-length", b"transfer-encoding")
SWEEP_TICKS = 10  # uvicorn ticks ten times a second


class Http(HttpToolsProtocol):
    """One connection. It answers headers over the limit with a 400 instead of collecting them, and
    knows how long it has waited for its client. It ignores offers to upgrade. It is refused if it
    has one of the last descriptors. Requests that come before the answer to an earlier one are
    answered in turn, also those that cannot be read."""

    num_refused: ClassVar[int] = 0  # connections for which no descriptor was left
    _num_header_bytes = 0
    _num_begun_bytes = 0  # of headers that are not complete
    _awaits_since_s = 0.0  # since when the rest of a request is awaited; 0: it is not
    _has_headers = _has_host = False
    _framing = b""  # the headers that tell the length of a body before which the parser stops
    _is_replaying = False  # a new parser reads them
    _unread_since_s = 0.0  # since when the client has read nothing; 0: it reads
    _begun: RequestResponseCycle | None = None  # the request that is answered now, or was last
    _refusal = ""  # of the request that came last: nothing more is read
    _is_full = False  # it was refused for want of memory

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._awaits_since_s = time.monotonic()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() > descriptor_limits()[0]:
            count_refused()
            transport.write(NO_DESCRIPTOR)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        if self._awaits_since_s and self._has_headers:
            self._awaits_since_s = time.monotonic()  # a body may take long while it arrives
        was_in_headers = bool(self._awaits_since_s) and not self._has_headers
        self._feed(data)
        if was_in_headers and not self._has_headers:
            self._num_begun_bytes += len(data)  # the parser reports only complete headers
            if self._num_begun_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(f"The headers exceed {MAX_HEADER_BYTES} bytes.")

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except (httptools.HttpParserError, MemoryError) as error:
            self._is_full = isinstance(error.__context__ or error, MemoryError)
            message = (
                "No memory for a request." if self._is_full else "Invalid HTTP request received."
            )
            self.logger.warning(message)
            self._refuse(message)

    def _refuse(self, message: str) -> None:
        """Answer the request that comes in with a 400, or a 503 where memory is full, after those
        before it."""
        is_answering = self._begun is not None and not self._begun.response_complete
        if self._awaits_since_s and self._has_headers:
            if self.cycle is self._begun:
                is_answering = False  # its own body
            else:
                self.pipeline.popleft()
        self._awaits_since_s, self._refusal = 0.0, message
        if not is_answering:
            self._send_refusal()

    def _send_refusal(self) -> None:
        if self._is_full:
            self.transport.write(NO_MEMORY)
            self.transport.close()
        else:
            self.send_400_response(self._refusal)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._begun = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refusal and not self.transport.is_closing():
            self._send_refusal()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._begun is not None and not self._begun.response_complete:
            self._begun.disconnected = True  # uvicorn tells the one that came last
            self._begun.message_event.set()
        super().connection_lost(exc)

    def _parse(self, data: bytes) -> bytes:
        """Parse up to the head of a request that offers an upgrade; what follows it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._go_on_without_upgrade()
            return data[error.args[0] :]
        return b""

    def _go_on_without_upgrade(self) -> None:
        """Clients offer HTTP/2 (Java's do with each new connection) or want a WebSocket. The parser
        stops there, before the body, which a new one reads."""
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools below 0.6.3; as uvicorn does
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing, self._framing = self._framing, b""
        if framing:
            self._is_replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._is_replaying = False

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        self._num_header_bytes = self._num_begun_bytes = 0
        self._awaits_since_s = time.monotonic()
        self._has_headers = self._has_host = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        self._has_headers = True
        if self.parser.should_upgrade():
            told = (b"%s: %s\r\n" % header for header in self.headers if header[0] in FRAMING)
            self._framing = b"".join(told)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._framing:
            return
        self._awaits_since_s = 0.0
        super().on_message_complete()

    def on_url(self, url: bytes) -> None:
        if not self._is_replaying:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replaying:
            return
        self._count(len(name) + len(value))
        if name.lower() == b"host":
            if self._has_host:
                raise InvalidRequest("several Host headers: send one")  # RFC 9112, 3.2
            self._has_host = True
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise PayloadTooLarge(f"the headers exceed {MAX_HEADER_BYTES} bytes")

    def pause_writing(self) -> None:
        self._unread_since_s = self._unread_since_s or time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = 0.0
        super().resume_writing()

    def close_stalled(self, now_s: float, limit_s: float) -> bool:
        """Close the connection if its client has stalled; whether it had."""
        if is_stalled := self._is_stalled(now_s, limit_s):
            self.transport.abort()  # its unread data is dropped
        return is_stalled

    def _is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether the client has sent or read nothing for longer than ``limit_s``."""
        if self._unread_since_s:
            return now_s - self._unread_since_s > limit_s
        if self.flow is not None and self.flow.read_paused:
            return False  # this side does not read
        return bool(self._awaits_since_s) and now_s - self._awaits_since_s > limit_s


def count_refused() -> None:
    """A connection was refused for want of descriptors."""
    Http.num_refused += 1


def is_news(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's log: not exceptions that errors.py has logged, nor calls that a second
    signal ends."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, asyncio.CancelledError) or getattr(error, "is_logged", False))


class Server(uvicorn.Server):
    """uvicorn without its signal handlers; it closes stalled connections."""

    def __init__(self, config: uvicorn.Config, stall_timeout_s: float) -> None:
        super().__init__(config)
        self._limit_s = stall_timeout_s
        self._swept_s = time.monotonic()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _log_started_message(self, listeners: Any) -> None:
        """``http/server.py`` logs when the engine is ready."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``, which this always has."""
        await super().startup([])
        config = self.config

        def protocol() -> asyncio.BaseProtocol:
            state: Any = {"server_state": self.server_state, "app_state": self.lifespan.state}
            made: asyncio.BaseProtocol = config.http_protocol_class(config=config, **state)  # type: ignore[call-arg, assignment]
            return made

        for sock in sockets or ():
            listener: Any = Listener(sock, protocol, count_refused, config.ssl)
            self.servers.append(listener)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self.sweep(time.monotonic())
        return await super().on_tick(counter)

    def sweep(self, now_s: float) -> None:
        """Close stalled connections, unless this process was itself suspended for a while."""
        was_suspended = now_s - self._swept_s > min(self._limit_s, 10.0)
        self._swept_s = now_s
        connections: Any = () if was_suspended else tuple(self.server_state.connections)
        num_stalled = sum(c.close_stalled(now_s, self._limit_s) for c in connections)
        self._report_refused()
        if num_stalled:
            log.warning("closed %d connections whose clients stalled", num_stalled)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._report_refused()  # since the last sweep
        await super().shutdown(sockets)

    def _report_refused(self) -> None:
        if Http.num_refused:
            log.warning(
                "refused %d connections: only %d file descriptors are left for the server itself; "
                "raise the limit (ulimit -n)",
                Http.num_refused,
                descriptor_limits()[1],
            )
            Http.num_refused = 0
