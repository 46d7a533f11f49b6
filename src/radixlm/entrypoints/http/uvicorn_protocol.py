"""HTTP/1.1 on one connection: uvicorn's protocol, with an end to headers and to patience.

A client that sends half a request, or leaves an answer unread, costs a socket and at most what the
kernel and the transport buffer; after --stall-timeout-s the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixlm.base.errors import PayloadTooLarge

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
SWEEP_TICKS = 10  # uvicorn ticks ten times a second


class Http(HttpToolsProtocol):
    """Refuses headers without end with a 400 instead of collecting them, and knows how long its
    client has kept it waiting."""

    _num_header_bytes = 0
    _num_begun_bytes = 0  # of a head that is not whole
    _awaits_since_s = 0.0  # the rest of a request; 0: nothing is awaited
    _is_head_whole = False
    _unread_since_s = 0.0  # the client takes nothing of what is sent; 0: it does

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._awaits_since_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self._awaits_since_s and self._is_head_whole:
            self._awaits_since_s = time.monotonic()  # a body may take long, if it comes
        was_begun = bool(self._awaits_since_s) and not self._is_head_whole
        super().data_received(data)
        if was_begun and not self._is_head_whole:
            self._num_begun_bytes += len(data)  # the parser tells of a header when it is whole
            if self._num_begun_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers exceed {MAX_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._num_header_bytes = self._num_begun_bytes = 0
        self._awaits_since_s, self._is_head_whole = time.monotonic(), False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_head_whole = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaits_since_s = 0.0
        super().on_message_complete()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
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

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether the client has kept us waiting for longer than ``limit_s``."""
        if self._unread_since_s:
            return now_s - self._unread_since_s > limit_s
        if self.flow is not None and self.flow.read_paused:
            return False  # it is we who do not read
        return bool(self._awaits_since_s) and now_s - self._awaits_since_s > limit_s


class Server(uvicorn.Server):
    """Signals are the caller's business, not uvicorn's; stalled connections are closed."""

    def __init__(self, config: uvicorn.Config, stall_timeout_s: float) -> None:
        super().__init__(config)
        self._limit_s = stall_timeout_s
        self._swept_s = time.monotonic()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _log_started_message(self, listeners: Any) -> None:
        """server.py says when the engine is ready, which is what counts."""

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self.sweep(time.monotonic())
        return await super().on_tick(counter)

    def sweep(self, now_s: float) -> None:
        """Close what is stalled; not after a while in which this process itself stood still."""
        was_away = now_s - self._swept_s > min(self._limit_s, 10.0)
        self._swept_s = now_s
        connections = () if was_away else tuple(self.server_state.connections)
        stalled = [c for c in connections if isinstance(c, Http)]
        stalled = [c for c in stalled if c.is_stalled(now_s, self._limit_s)]
        for connection in stalled:
            connection.transport.abort()  # what it has not read is dropped
        if stalled:
            log.warning("%d connections closed: their clients stall", len(stalled))
