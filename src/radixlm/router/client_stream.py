"""ClientStream: what the answer to one call is written to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from radixlm.router.answer import Answer
from radixlm.router.call import Call, Headers

if TYPE_CHECKING:
    from radixlm.router.http_server import Connection

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}".encode() for s in HTTPStatus}


class ClientStream:
    """The answer to one call: ``begin``, any number of ``write``, ``end``. All do nothing once the
    client is gone. ``status`` and ``num_bytes`` (of the body) say what was sent."""

    # defaults of the class: an answer that needs no other sets none
    _is_chunked = False
    _head = b""  # not yet written: it goes with the first bytes of the body
    _left: int | None = None  # bytes of the body that are promised
    _pause: Callable[[], None] | None = None
    _resume: Callable[[], None] | None = None
    has_begun = has_ended = is_gone = False
    status = num_bytes = 0
    begun_s = 0.0

    def __init__(
        self, connection: Connection, call: Call | None, is_http11: bool, is_kept: bool
    ) -> None:
        self._connection: Connection | None = connection
        self.call = call  # that is answered
        self._has_body = call is None or call.method != "HEAD"
        self._is_http11, self._is_kept = is_http11, is_kept
        self.added_headers: Headers = []  # to be sent with any answer

    def begin(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """Send the head. ``headers``: no hop-by-hop ones and no content-length; ``length``: bytes
        of the body, where they are known; the head then goes with them."""
        self.has_begun, self.status, self.begun_s = True, status, time.monotonic()
        connection = self._connection
        if connection is None:
            return
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown" % status]
        lines += map(b": ".join, headers)
        lines += map(b": ".join, self.added_headers)
        if status in (204, 304):
            self._has_body = False
        elif length is not None:
            lines.append(b"content-length: %d" % length)
            self._left = length
        elif self._is_http11:
            lines.append(b"transfer-encoding: chunked")
            self._is_chunked = True
        else:
            self._is_kept = False
        if not self._is_kept or connection.server.is_draining:
            self._is_kept = False
            lines.append(b"connection: close")
        elif not self._is_http11:
            lines.append(b"connection: keep-alive")
        lines.append(b"\r\n")
        self._head = b"\r\n".join(lines)
        if length is None:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the head, where no body came with it."""
        head, self._head = self._head, b""
        if head and self._connection is not None:
            self._connection.transport.write(head)

    def write(self, data: bytes) -> None:
        """Send some of the body."""
        self.num_bytes += len(data)
        connection = self._connection
        if connection is None or not self._has_body or not data:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self.abort()
                return
        if self._head:
            data, self._head = self._head + data, b""
        connection.transport.write(data)

    def end(self) -> None:
        """The answer is complete. A body shorter than its length closes the connection."""
        connection, self._connection = self._connection, None
        self.has_ended = True
        if self._pause is not None:
            self._pause = self._resume = None
        if connection is None:
            return
        last = b"0\r\n\r\n" if self._has_body and self._is_chunked else b""
        if last or self._head:
            connection.transport.write(self._head + last)
        if self._has_body and self._left:
            self._is_kept = False
        connection.answered(self._is_kept)

    def answer(self, answer: Answer) -> None:
        """Send a whole answer, of bytes."""
        assert isinstance(answer.body, bytes)
        kind = (b"content-type", answer.content_type.encode())
        self.begin(answer.status, [kind, *answer.headers], length=len(answer.body))
        self.write(answer.body)
        self.end()

    def abort(self) -> None:
        """Cut the connection: the client must not take what it has for a whole answer."""
        if self._connection is not None:
            self._connection.transport.abort()
            self.has_ended = True

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Call ``pause`` when the client reads too slowly, ``resume`` when it has caught up."""
        self._pause, self._resume = pause, resume
        if self._connection is not None and self._connection.is_full:
            pause()

    # of the connection

    def left(self) -> None:
        """The client is gone; what serves the call is cancelled after."""
        self._connection = None
        self.is_gone = True

    def pressed(self, is_full: bool) -> None:
        """The connection's buffer is full, or has room again."""
        callback = self._pause if is_full else self._resume
        if callback is not None:
            callback()
