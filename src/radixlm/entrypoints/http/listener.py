"""Listener: accepts connections, and refuses those that would take the last file descriptors.

An event loop's own server accepts all that wait before it looks at the first. Where descriptors run
out meanwhile, libuv (``uv__emfile_trick``) closes connections without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from radixlm.entrypoints.http.descriptors import BACKLOG, descriptor_limits

_BODY = (
    b'{"error": {"message": "no file descriptor is left for more connections: raise ulimit -n", '
    b'"type": "server_error", "param": null, "code": "overloaded"}}'
)
NO_DESCRIPTOR = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
LINGER_S = 1.0  # how long a refused client may go on sending: a reset would cost it the answer
TURN = 32  # connections that are accepted in one turn of the event loop
REST_S = 0.1  # after the system had no descriptor or memory for a connection


class Listener:
    """In place of ``asyncio.Server``, with what uvicorn and the gateway ask of one. ``factory``
    makes the protocol of a connection; ``on_refused`` is called for each that gets NO_DESCRIPTOR.
    With ``context`` (TLS) the protocol refuses, since it can answer."""

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        on_refused: Callable[[], None] = lambda: None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._factory, self._context = sock, factory, context
        self._on_refused = on_refused
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: dict[socket.socket, asyncio.TimerHandle] = {}  # of clients that were refused
        self._num_refusing = 0  # open connections with reserved descriptors
        self._is_reading = self._is_closed = False
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._go_on()

    def close(self) -> None:
        """Accept no more; connections that were accepted stay."""
        if self._is_closed:
            return
        self._pause()
        self._is_closed = True
        for client in tuple(self._ends):
            self._drop(client)
        self._sock.close()

    async def wait_closed(self) -> None:
        """As of ``asyncio.Server``."""

    def _go_on(self) -> None:
        if not (self._is_reading or self._is_closed or self._num_refusing >= self._most):
            self._loop.add_reader(self._sock.fileno(), self._accept)
            self._is_reading = True

    def _pause(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._sock.fileno())
            self._is_reading = False

    @property
    def _most(self) -> int:
        """How many connections may hold reserved descriptors; further ones wait in the system."""
        return max(1, descriptor_limits()[1] // 4)

    def _accept(self) -> None:
        for _ in range(TURN):
            if self._num_refusing >= self._most:
                self._pause()
                return
            try:
                client = self._sock.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._pause()
                self._loop.call_later(REST_S, self._go_on)
                return
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        client.setblocking(False)
        is_last = client.fileno() > descriptor_limits()[0]
        self._num_refusing += is_last
        if is_last and self._context is None:
            self._refuse(client)
            return
        task = self._loop.create_task(self._connect(client, is_last))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket, is_last: bool) -> None:
        try:
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._factory, client, ssl=self._context)
        except OSError:  # it has left, or its handshake failed
            client.close()
        finally:
            self._num_refusing -= is_last
            self._go_on()

    def _refuse(self, client: socket.socket) -> None:
        self._on_refused()
        with contextlib.suppress(OSError):
            client.send(NO_DESCRIPTOR)
            client.shutdown(socket.SHUT_WR)
        self._ends[client] = self._loop.call_later(LINGER_S, self._drop, client)
        self._loop.add_reader(client.fileno(), self._discard, client)

    def _discard(self, client: socket.socket) -> None:
        """Read what a refused client still sends."""
        try:
            is_over = not client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            is_over = True
        if is_over:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._ends.pop(client).cancel()
        self._loop.remove_reader(client.fileno())
        client.close()
        self._num_refusing -= 1
        self._go_on()
