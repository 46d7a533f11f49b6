"""HTTP/2 (RFC 9113) beside HTTP/1.1 for --enable-http2, by the package h2 (extra ``http2``).

Clients begin with HTTP/2 at once: over plain TCP with prior knowledge, over TLS after its
negotiation (ALPN). Offers to upgrade a connection of HTTP/1.1 are ignored: RFC 9113 removed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

import uvicorn
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from uvicorn.server import ServerState

from radixlm.config.serve import ServeConfig
from radixlm.entrypoints.http.uvicorn_protocol import MAX_HEADER_BYTES, Http

log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # how a client begins (RFC 9113, 3.4)
MAX_FRAME_BYTES = 9 + 16_384  # with its header
MIN_WINDOW = 65_535  # bytes; what a connection begins with cannot be less
# headers of a connection of HTTP/1.1, which an answer may not have here (RFC 9113, 8.2.2)
OF_CONNECTION = set(b"connection keep-alive proxy-connection transfer-encoding upgrade".split())
FAILED = b"Internal Server Error"


@dataclass(frozen=True, slots=True)
class Http2Limits:
    max_streams: int  # that run at once on one connection
    window: int  # bytes that a client may send before they are read


class EitherHttp(Http):
    """A connection whose first bytes tell whether it speaks HTTP/2."""

    def __init__(self, limits: Http2Limits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._opening: bytes | None = b""  # bytes that both protocols may begin with

    def data_received(self, data: bytes) -> None:
        if self._opening is None:
            super().data_received(data)
            return
        self._opening += data
        if len(self._opening) < len(PREFACE) and PREFACE.startswith(self._opening):
            return
        data, self._opening = self._opening, None
        if data.startswith(PREFACE):
            self._go_on_with_http2(data)
        else:
            super().data_received(data)

    def _go_on_with_http2(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        base = {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "http_version": "2",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
        }
        connection = Http2(self.config, self.server_state, self._limits, base)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        connection.data_received(data)


class Http2(asyncio.Protocol):
    """One connection: it gives each stream to the application as a request of its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        limits: Http2Limits,
        base: dict[str, Any],
    ) -> None:
        """``base``: what the scopes of all its requests have in common."""
        self.config, self.state, self.base = config, state, base
        self.limits = limits
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.window,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self.streams: dict[int, Stream] = {}
        self.num_running = 0  # calls of the application, also those whose client has gone
        self.can_write = asyncio.Event()
        self.can_write.set()
        self._unread_since_s = 0.0  # since when the client has read nothing; 0: it reads
        self._is_leaving = False  # no further streams
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.state.connections.add(self)  # type: ignore[arg-type]
        self.h2.initiate_connection()
        if self.limits.window > MIN_WINDOW:
            self.h2.increment_flow_control_window(self.limits.window - MIN_WINDOW)
        self.write()
        self._wait_for_streams()

    def data_received(self, data: bytes) -> None:
        try:
            found = self.h2.receive_data(data)
            if len(self.h2.incoming_buffer._data) > MAX_FRAME_BYTES:  # h2 looks when it is whole
                raise ProtocolError("a frame exceeds 16,384 bytes")
        except (ProtocolError, MemoryError) as error:
            log.info("an HTTP/2 connection is closed: %s", error)
            self._end()
            return
        for event in found:
            self._take(event)
        self.write()

    def _take(self, event: events.Event) -> None:
        number: int = getattr(event, "stream_id", 0) or 0
        stream = self.streams.get(number)
        if isinstance(event, events.RequestReceived):
            self._open(number, event)
        elif isinstance(event, events.DataReceived):
            if stream is None:
                self.h2.acknowledge_received_data(event.flow_controlled_length, number)
            else:
                stream.take(event.data, event.flow_controlled_length)
        elif isinstance(event, events.StreamEnded) and stream is not None:
            stream.end_body()
        elif isinstance(event, events.StreamReset) and stream is not None:
            self.close(stream)
        elif isinstance(event, events.WindowUpdated | events.RemoteSettingsChanged):
            for one in [stream] if stream else list(self.streams.values()):
                one.window.set()
        elif isinstance(event, events.ConnectionTerminated):
            self._end()  # h2 writes nothing after it

    def _open(self, number: int, event: events.RequestReceived) -> None:
        if self._is_leaving or self.num_running >= self.limits.max_streams:
            self._reset(number, ErrorCodes.REFUSED_STREAM)  # it may be sent again
            return
        scope = scope_of(event.headers, self.base)
        if scope is None:
            self._reset(number, ErrorCodes.PROTOCOL_ERROR)
            return
        if self._idle is not None:
            self._idle.cancel()
        stream = self.streams[number] = Stream(self, number, scope)
        self.state.total_requests += 1
        self.num_running += 1
        task = asyncio.get_running_loop().create_task(stream.run(self.config.loaded_app))
        self.state.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.state.tasks.discard(task)
        self.num_running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.getLogger("uvicorn.error").error(
                "Exception in ASGI application", exc_info=error
            )

    def close(self, stream: Stream, code: ErrorCodes | None = None) -> None:
        """Forget a stream that has ended; with ``code`` it is ended by a reset."""
        if self.streams.pop(stream.number, None) is None:
            return
        stream.leave()
        if stream.num_unread:
            self.h2.acknowledge_received_data(stream.num_unread, stream.number)
        if code is not None:
            self._reset(stream.number, code)
        self.write()
        self._wait_for_streams()

    def _reset(self, number: int, code: ErrorCodes) -> None:
        with contextlib.suppress(ProtocolError):  # the client has done so
            self.h2.reset_stream(number, code)

    def _wait_for_streams(self) -> None:
        if self.streams or self.transport.is_closing():
            return
        if self._is_leaving:
            self.h2.close_connection()
            self.write()
            self.transport.close()
            return
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self.config.timeout_keep_alive, self.shutdown)

    def write(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def shutdown(self) -> None:
        """Refuse further streams, and close when those that run have ended. uvicorn calls it. The
        GOAWAY comes last: clients that use h2 too read no answers after it."""
        self._is_leaving = True
        self._wait_for_streams()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)  # type: ignore[arg-type]
        if self._idle is not None:
            self._idle.cancel()
        self._end()
        self.can_write.set()

    def _end(self) -> None:
        """End all streams, tell the client why if h2 has said so, and close."""
        for stream in self.streams.values():
            stream.leave()
        self.streams.clear()
        self.write()
        self.transport.close()

    def pause_writing(self) -> None:
        self._unread_since_s = time.monotonic()
        self.can_write.clear()
        self.transport.pause_reading()  # what comes asks for answers

    def resume_writing(self) -> None:
        self._unread_since_s = 0.0
        self.can_write.set()
        self.transport.resume_reading()

    def close_stalled(self, now_s: float, limit_s: float) -> bool:
        """Close the connection, or streams of it, whose client has sent or read nothing for longer
        than ``limit_s``; whether there were any."""
        if self._unread_since_s and now_s - self._unread_since_s > limit_s:
            self.transport.abort()
            return True
        stalled = [s for s in self.streams.values() if s.is_stalled(now_s, limit_s)]
        for stream in stalled:
            self.close(stream, ErrorCodes.CANCEL)
        return bool(stalled)


class Stream:
    """One request, as an application of ASGI sees it."""

    def __init__(self, connection: Http2, number: int, scope: dict[str, Any]) -> None:
        self.number, self._scope = number, scope
        self._connection, self._h2 = connection, connection.h2
        self._body, self.num_unread = bytearray(), 0  # bytes of flow control that wait to be read
        self._is_whole = self._is_read = False  # the body has come, and is given on
        self._is_gone = False  # the client, or the stream has ended
        self._news = asyncio.Event()
        self.window = asyncio.Event()  # the client may have room again
        self._awaits_since_s = time.monotonic()  # since when more of the body is awaited; 0: not
        self._blocked_since_s = 0.0  # since when the client has no room; 0: it has
        self._has_begun = False
        self._expects = any(
            name == b"expect" and value.lower() == b"100-continue"
            for name, value in scope["headers"]
        )

    async def run(self, app: Any) -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except BaseException:
            if not self._is_gone and not self._has_begun:
                headers = [(b"content-type", b"text/plain; charset=utf-8")]
                await self.send({"type": "http.response.start", "status": 500, "headers": headers})
                await self.send({"type": "http.response.body", "body": FAILED})
            raise
        finally:
            self._connection.close(self, ErrorCodes.INTERNAL_ERROR)  # unless it has ended

    def take(self, data: bytes, num_bytes: int) -> None:
        """``num_bytes``: of flow control, which counts padding too."""
        self._body += data
        self.num_unread += num_bytes
        self._awaits_since_s = time.monotonic()
        self._news.set()

    def end_body(self) -> None:
        self._is_whole, self._awaits_since_s = True, 0.0
        self._news.set()

    def leave(self) -> None:
        self._is_gone = True
        self._news.set()
        self.window.set()

    async def receive(self) -> dict[str, Any]:
        while not self._is_gone and (self._is_read or not (self._body or self._is_whole)):
            if self._expects and not self._has_begun:
                self._expects = False
                self._h2.send_headers(self.number, [(b":status", b"100")])
                self._connection.write()
            self._news.clear()
            await self._news.wait()
        if self._is_gone:
            return {"type": "http.disconnect"}
        data, self._is_read = bytes(self._body), self._is_whole
        self._body.clear()
        if self.num_unread:
            self._h2.acknowledge_received_data(self.num_unread, self.number)
            self.num_unread = 0
            self._connection.write()
        return {"type": "http.request", "body": data, "more_body": not self._is_whole}

    async def send(self, message: dict[str, Any]) -> None:
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = [*self._connection.state.default_headers, *message.get("headers", ())]
            named = ((name.lower(), value) for name, value in headers)
            status = (b":status", str(message["status"]).encode())
            kept = (header for header in named if header[0] not in OF_CONNECTION)
            self._h2.send_headers(self.number, [status, *kept])
            self._connection.write()
            return
        is_last = not message.get("more_body", False)
        body = b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
        await self._send_data(bytes(body), is_last)
        if is_last and not self._is_gone:
            # the rest of a body that nobody has read is not wanted
            self._connection.close(self, None if self._is_whole else ErrorCodes.NO_ERROR)

    async def _send_data(self, data: bytes, is_last: bool) -> None:
        start, has_ended = 0, not is_last
        while start < len(data) or not has_ended:
            while start < len(data) and not self._room():
                self._blocked_since_s = self._blocked_since_s or time.monotonic()
                self.window.clear()
                await self.window.wait()
                if self._is_gone:
                    return
            self._blocked_since_s = 0.0
            part = data[start : start + self._room()]
            start += len(part)
            has_ended |= start == len(data)
            self._h2.send_data(self.number, part, end_stream=is_last and has_ended)
            self._connection.write()
            await self._connection.can_write.wait()
            if self._is_gone:
                return

    def _room(self) -> int:
        """Bytes that the client takes in one frame now."""
        window = self._h2.local_flow_control_window(self.number)
        return max(0, min(window, self._h2.max_outbound_frame_size))

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether the client has sent nothing of its body, or has had no room for the answer, for
        longer than ``limit_s``."""
        since_s = self._blocked_since_s or (0.0 if self.num_unread else self._awaits_since_s)
        return bool(since_s) and now_s - since_s > limit_s


def scope_of(headers: Any, base: dict[str, Any]) -> dict[str, Any] | None:
    """The scope of a request (ASGI); None if its path is not ASCII or missing."""
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    fields = [(name, value) for name, value in headers if not name.startswith(b":")]
    if (authority := pseudo.get(b":authority")) is not None:
        fields = [(b"host", authority), *(one for one in fields if one[0] != b"host")]
    raw_path, _, query = pseudo.get(b":path", b"").partition(b"?")
    if not raw_path.startswith(b"/") or not raw_path.isascii():
        return None
    path = urllib.parse.unquote(raw_path.decode("ascii"))
    return base | {
        "method": pseudo[b":method"].decode("ascii"),
        "path": base["root_path"] + path,
        "raw_path": base["root_path"].encode("ascii") + raw_path,
        "query_string": query,
        "headers": fields,
        "state": {},
    }


def http2_limits(serve: ServeConfig) -> Http2Limits:
    window = max(serve.http2_initial_connection_window_size, MIN_WINDOW)
    return Http2Limits(serve.http2_max_concurrent_streams, window)
