"""Answers that the gateway itself gives, and the table of its own routes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal

import orjson

from radixlm.base.errors import InvalidRequest, anthropic_type
from radixlm.base.record import Record, field
from radixlm.router.call import Call, Headers


class Answer(Record):
    """A whole answer. ``body``: bytes, or an iterator of chunks."""

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    content_type: str = "application/json"
    headers: Headers = field(default_factory=list)


Access = Literal["open", "key", "admin"]
Handler = Callable[[Call], Awaitable[Answer]]


class Route(Record):
    """``access``: open to all, needs the key of the data routes, or one of an administrator."""

    handler: Handler
    access: Access
    path: str


class Routes:
    """Method and path -> handler. A name in braces matches one segment, "/workers/{id}", or with
    ":path" any number of them, "/v1/models/{model:path}"."""

    def __init__(self) -> None:
        self._exact: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Route]] = []
        self._paths: set[str] = set()

    def add(self, method: str, path: str, handler: Handler, access: Access = "admin") -> None:
        """Serve ``method path`` by ``handler``."""
        route = Route(handler, access, path.replace(":path}", "}"))
        if "{" not in path:
            self._exact[method, path] = route
            self._paths.add(path)
            return
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
        pattern = re.sub(r"\\{(\w+):path\\}", r"(?P<\1>.+)", pattern)
        self._patterns.append((method, re.compile(pattern), route))

    def find(self, call: Call) -> Route | None:
        """The route of a call, whose ``path_args`` are set; None where there is none."""
        route = self._exact.get((call.method, call.path))
        if route is not None:
            return route
        for method, pattern, route in self._patterns:
            if method == call.method and (match := pattern.fullmatch(call.path)):
                call.path_args = match.groupdict()
                return route
        return None

    def shown(self, path: str) -> str | None:
        """The path of the route that serves ``path``, as it was added."""
        if path in self._paths:
            return path
        return next((r.path for _, pattern, r in self._patterns if pattern.fullmatch(path)), None)

    def methods(self, path: str) -> list[str]:
        """Methods that ``path`` has, for a 405."""
        exact = [method for method, known in self._exact if known == path]
        return exact + [m for m, pattern, _ in self._patterns if pattern.fullmatch(path)]


def json_answer(value: Any, status: int = 200, headers: Headers | None = None) -> Answer:
    """An answer with JSON."""
    return Answer(status, orjson.dumps(value), headers=headers or [])


def error_answer(
    status: int,
    message: str,
    code: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    retry_after_s: float | None = None,
    call: Call | None = None,
) -> Answer:
    """An error as OpenAI's, {"error": {message, type, code, param}}, or in the form of ``call``."""
    error = {"message": message, "type": kind, "code": code, "param": param}
    body = orjson.dumps({"error": error})
    if call is not None:
        body = in_form_of(call, status, body)
    headers: Headers = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    return Answer(status, body, headers=headers)


def is_anthropic(call: Call) -> bool:
    """Whether the client is Anthropic's, which reads other forms of errors and model cards."""
    return call.header(b"anthropic-version") is not None


def in_form_of(call: Call, status: int, body: bytes) -> bytes:
    """The body of an ``error_answer`` in the form that the client of ``call`` reads: Anthropic's,
    Ollama's, else OpenAI's."""
    if is_anthropic(call) or call.path.startswith("/v1/messages"):
        error = orjson.loads(body)["error"] | {"type": anthropic_type(status)}
        return orjson.dumps({"type": "error", "error": error})
    if call.path.startswith("/api/"):
        return orjson.dumps({"error": orjson.loads(body)["error"]["message"]})
    return body


def cut_page(
    items: list[dict[str, Any]], asked: Mapping[str, str], after: str, limit: int, most: int
) -> tuple[list[dict[str, Any]], bool]:
    """The ``limit`` items, unless ``asked`` says how many up to ``most``, behind the one that its
    field ``after`` names; and whether there are more. InvalidRequest."""
    text = asked.get("limit", str(limit))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit must be from 1 to {most}", "limit")
    if after in asked:
        places = [place for place, item in enumerate(items) if item["id"] == asked[after]]
        if not places:
            raise InvalidRequest(f"{after}: no item {asked[after]!r:.100}", after)
        items = items[places[0] + 1 :]
    return items[: int(text)], len(items) > int(text)
