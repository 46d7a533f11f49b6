"""Connections to workers: pooled, kept alive, without a task switch between a read and its sink."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Iterable

from radixlm.base.errors import ConfigError
from radixlm.router.call import Headers
from radixlm.router.exchange import (
    Connection,
    Cut,
    Exchange,
    NoDescriptor,
    Origin,
    Response,
    Sink,
    Unreachable,
)

CONNECT_TIMEOUT_S = 5.0
KEEP_IDLE_S = 50.0
MAX_IDLE = 500  # connections to a worker
TCP_KEEPALIVE_S = 30
TICK_S = 0.1
MAX_CONTROL_BYTES = 64 << 20


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
        self._origins: dict[str, Origin] = {}
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

    def num_received(self, url: str) -> int:
        """Pieces of answers that have come from a worker: while it grows, the worker lives."""
        origin = self._origins.get(url)
        return origin.num_received if origin is not None else 0

    def close(self) -> None:
        """Close all idle connections."""
        for url in list(self._origins):
            self.forget(url)

    def _origin(self, url: str) -> Origin:
        if url.startswith("https:") and self._context is None:
            self._context = _client_context(*self._tls)
        return self._origins.setdefault(url, Origin(url, self._context, self._max_idle))

    async def _connect(self, origin: Origin, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        limit_s = min(timeout_s, self._connect_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin, loop), origin.host, origin.port, ssl=origin.context
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
