"""HTTP for backends: kept connections, JSON in and out, events of a stream."""

from __future__ import annotations

import http.client
import json
import select
import ssl
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

MAX_IDLE_S = 3.0  # servers close connections that are idle for longer: uvicorn after 5 s


class HttpClient:
    """``verify``: a file with certificates to trust, or False for none (https only).
    ``timeout_s``: of each wait for the server; None for no limit."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """ValueError if ``base_url`` is none."""
        # connections that no request uses, and since when
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        # not __del__: in a cycle the sockets might be collected first, which is a warning
        weakref.finalize(self, _close_all, self._idle)
        self._timeout_s = timeout_s
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url {base_url!r}: http://127.0.0.1:30000 has the form")
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context(
                cafile=verify if isinstance(verify, str) else None
            )
            if verify is False:
                self._context.check_hostname = False
                self._context.verify_mode = ssl.CERT_NONE
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer, or its text. RuntimeError with what a server says of an error."""
        connection = self._take()
        try:
            response = self._send(connection, method, path, body)
            data = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))
        try:
            value = json.loads(data)
        except ValueError:
            value = data.decode(errors="replace")
        _check(response, value)
        return value

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The JSON events of a stream, by a connection of its own."""
        connection = self._connect()
        try:
            response = self._send(connection, "POST", path, body)
            if response.status != http.client.OK:
                _check(response, response.read().decode(errors="replace"))
            for line in response:
                data = line.strip()
                if data == b"data: [DONE]":
                    return
                if data.startswith(b"data:"):
                    event = json.loads(data[5:])
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    yield event
            raise RuntimeError("the server closed the connection before the stream's end")
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connections; a later request makes new ones."""
        _close_all(self._idle)

    def _connect(self) -> http.client.HTTPConnection:
        where = self._host, self._port
        if self._context is not None:
            return http.client.HTTPSConnection(
                *where, timeout=self._timeout_s, context=self._context
            )
        return http.client.HTTPConnection(*where, timeout=self._timeout_s)

    def _take(self) -> http.client.HTTPConnection:
        """A connection: a kept one that the server has not closed, or a new one."""
        with suppress(IndexError):
            while True:
                idle_since_s, kept = self._idle.pop()
                poller = select.poll()
                poller.register(kept.sock, select.POLLIN)  # there is nothing to read but the end
                if time.monotonic() - idle_since_s < MAX_IDLE_S and not poller.poll(0):
                    return kept
                kept.close()
        return self._connect()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        is_kept = connection.sock is not None
        try:
            connection.request(method, self._path + path, data, self._headers)
        except OSError:
            connection.close()
            if not is_kept:
                raise
            # the server has not got it whole; what it has got is never sent again
            connection.request(method, self._path + path, data, self._headers)
        return connection.getresponse()


def _check(response: http.client.HTTPResponse, value: Any) -> None:
    if not 200 <= response.status < 300:
        raise RuntimeError(value)


def _close_all(idle: list[tuple[float, http.client.HTTPConnection]]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop()[1].close()
