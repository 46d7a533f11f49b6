"""Api: chat completions of a server, ours or any that speaks OpenAI's API, for a person who waits.

Answers come as server-sent events (https://platform.openai.com/docs/api-reference/chat-streaming).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from radixlm.base.errors import ConfigError, RadixError
from radixlm.base.record import Record

CONNECT_S = 5.0
READ_S = 600.0  # a long prompt may take that long on a CPU
Kind = Literal["text", "thinking", "usage", "finish", "progress"]


class Refused(RadixError):
    """The server has refused a request, or cannot be reached, also in mid-answer. ``status``: of
    its answer, 0 without one."""

    status = 0


class Event(Record):
    """A part of an answer: ``text`` of the answer or of the thinking before it, the reason of its
    ``finish``, its ``usage``, or before all that the ``progress`` of a long prompt."""

    kind: Kind
    text: str = ""
    usage: Mapping[str, Any] = {}


class Api:
    """One server. ``model``: the name that requests carry."""

    def __init__(self, url: str, key: str | None = None, model: str = "") -> None:
        """ConfigError for what is no http(s) URL."""
        wrong = ConfigError(f"--url {url}: use a URL such as http://127.0.0.1:30000")
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise wrong
        except ValueError as error:
            raise wrong from error
        self.url, self._parts = url, parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "X-Prefill-Progress": "yes"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model

    @contextmanager
    def _ask(
        self, method: str, path: str, body: Any = None, wait_s: float = READ_S
    ) -> Iterator[http.client.HTTPResponse]:
        """The response, to be read; Refused if there is none or its status is not 200. The server
        stops when the connection ends."""
        make = http.client.HTTPSConnection
        if self._parts.scheme == "http":
            make = http.client.HTTPConnection  # type: ignore[assignment]
        host = self._parts.hostname
        assert host is not None
        connection = make(host, self._parts.port, timeout=min(wait_s, CONNECT_S))
        content = None if body is None else json.dumps(body).encode()
        with closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(wait_s)
                connection.request(method, self._root + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise Refused(f"{self.url} does not answer: {error}") from error
            with response:
                if response.status != 200:
                    refused = Refused(_message(response.status, response.read(100_000)))
                    refused.status = response.status
                    raise refused
                yield response

    def read(self, path: str, wait_s: float = CONNECT_S) -> bytes:
        """What a GET answers; Refused."""
        try:
            with self._ask("GET", path, wait_s=wait_s) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"{self.url} does not answer: {error or 'cut'}") from error

    def models(self, wait_s: float = CONNECT_S) -> list[str]:
        """The names of the models that it serves."""
        with self._ask("GET", "/v1/models", wait_s=wait_s) as response:
            try:
                return [str(one["id"]) for one in json.loads(response.read())["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise Refused(f"{self.url}: /v1/models is not as OpenAI's") from error

    def answer(self, fields: Mapping[str, Any]) -> Iterator[Event]:
        """The answer to a request of chat/completions, as it comes. Close the iterator to stop it.
        Refused, also in mid-answer."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._ask("POST", "/v1/chat/completions", {**body, **fields}) as response:
                yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"the connection was lost: {error or 'cut'}") from error


def _events(response: http.client.HTTPResponse) -> Iterator[Event]:
    while line := response.readline():
        if line.startswith(b": "):
            yield Event("progress", line[2:].decode("utf-8", "replace").strip())
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise Refused(f"the server sent what is no JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise Refused(f"the server sent what is no object: {data[:80]!r}")
        if told := chunk.get("error"):
            raise Refused(str(told.get("message", told) if isinstance(told, dict) else told))
        yield from _events_of(chunk)


def _events_of(chunk: Mapping[str, Any]) -> Iterator[Event]:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        thinking = delta.get("reasoning_content") or delta.get("reasoning")
        if thinking:
            yield Event("thinking", str(thinking))
        if delta.get("content"):
            yield Event("text", str(delta["content"]))
        if choice.get("finish_reason"):
            yield Event("finish", str(choice["finish_reason"]))
    if chunk.get("usage"):
        yield Event("usage", usage=chunk["usage"])


def _message(status: int, content: bytes) -> str:
    """What an error response says."""
    try:
        body = json.loads(content)
        error = body.get("error", body)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = content[:200].decode("utf-8", "replace")
    return f"{said} ({status})"
