"""HTTP for backends: one kept connection a thread, JSON in and out, events of a stream."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

_STALE = (http.client.RemoteDisconnected, ConnectionError, http.client.CannotSendRequest)


class HttpClient:
    """``verify``: a file with certificates to trust, or False for none (https only)."""

    def __init__(
        self, base_url: str, api_key: str | None = None, verify: str | bool | None = None
    ) -> None:
        """ValueError if ``base_url`` is none."""
        self._kept: list[http.client.HTTPConnection] = []  # of all threads
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
        self._local = threading.local()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer, or its text. RuntimeError with what a server says of an error."""
        connection, response = self._send(method, path, body)
        data = response.read()
        if response.will_close:
            connection.close()
        try:
            value = json.loads(data)
        except ValueError:
            value = data.decode(errors="replace")
        _check(response, value)
        return value

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The JSON events of a stream, by a connection of its own."""
        connection, response = self._send("POST", path, body, self._connect())
        try:
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
        for connection in self._kept:
            connection.close()

    __del__ = close

    def _connect(self) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, context=self._context)
        return http.client.HTTPConnection(self._host, self._port)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        connection: http.client.HTTPConnection | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        kept = getattr(self._local, "connection", None) if connection is None else None
        if kept is not None:
            try:  # the server may have closed it meanwhile
                kept.request(method, self._path + path, data, self._headers)
                return kept, kept.getresponse()
            except _STALE:
                kept.close()
                self._kept.remove(kept)
        if connection is None:
            connection = self._local.connection = self._connect()
            self._kept.append(connection)
        connection.request(method, self._path + path, data, self._headers)
        return connection, connection.getresponse()


def _check(response: http.client.HTTPResponse, value: Any) -> None:
    if not 200 <= response.status < 300:
        raise RuntimeError(value)
