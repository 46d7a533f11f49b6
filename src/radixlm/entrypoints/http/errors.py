"""From exceptions to HTTP responses.

Bodies have OpenAI's form {"error": {message, ...}}, and beside it the fields of SGLang's form
{"object": "error", "message", "type", "param", "code"}.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from radixlm.base.errors import (
    EngineError,
    Overloaded,
    QueueFull,
    RadixError,
    RequestError,
    anthropic_type,
)
from radixlm.entrypoints.http.off_loop import JSON_OPTIONS, encoded, is_large
from radixlm.wire.fields import FIELDS, renames
from radixlm.wire.replies import Finish
from radixlm.wire.sampling_params import SAMPLING_FIELDS

log = logging.getLogger(__name__)

_NO_MEMORY = Overloaded("the server is out of memory", retry_after_s=1)
# OpenAI has "invalid_request_error" for keys, names and sizes too; ``code`` tells them apart
_TYPES = {429: "requests", 501: "not_supported_error"}
ANTHROPIC_PATH = "/v1/messages"
_CODES = {405: "method_not_supported"}
# path -> chat's names of fields -> the route's, for routes whose bodies become chat requests
_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/responses": renames("chat", "responses", SAMPLING_FIELDS, FIELDS),
    ANTHROPIC_PATH: renames("chat", "messages", SAMPLING_FIELDS, FIELDS),
    "/api/": renames("chat", "ollama", FIELDS)
    | renames("chat", "ollama_options", SAMPLING_FIELDS)
    | {"max_tokens": "num_predict"},
}


# the engine's message about a grammar that it cannot compile
_INVALID = re.compile(r"invalid (json_schema|json_object|regex|ebnf|structural_tag|lark)\b")


_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_FAILS = frozenset({errno.EIO, errno.EROFS})  # it may be repaired, or mounted again
_SQLITE_FAILS = ("disk I/O", "malformed", "readonly", "unable to open")
# flags of folders, and how the routes that write to them begin
_FOLDERS = {
    "--file-storage-path": ("/v1/files", "/v1/batches", "/v1/responses", "/v1/conversations"),
    "--crash-dump-folder": ("/dump_requests",),
}


class DiskFull(RadixError):
    """507 Insufficient Storage."""

    status = 507
    code = "insufficient_storage"


def disk_fault(error: BaseException, path: str = "") -> RadixError | None:
    """What a client is told of an error, one of a group, or the cause of an ``Overloaded``, that
    means that a disk is full or fails; None for other errors. ``path``: of the route."""
    if isinstance(error, Overloaded) and error.__cause__ is not None:
        return disk_fault(error.__cause__, path)
    if isinstance(error, BaseExceptionGroup):
        faults = (disk_fault(inner, path) for inner in error.exceptions)
        return next(filter(None, faults), None)
    flags = (f" of {flag}" for flag, routes in _FOLDERS.items() if path.startswith(routes))
    flag = next(flags, "")
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if isinstance(error, sqlite3.Error) else ""
    if number in _DISK_FULL or "full" in text:
        return DiskFull(f"the server's disk{flag} is full")
    if number in _DISK_FAILS or any(part in text for part in _SQLITE_FAILS):
        reason = text or os.strerror(number or errno.EIO)
        return Overloaded(f"the server's disk{flag} fails: {reason}", retry_after_s=10)
    return None


class FinishError(RadixError):
    """A request that ended in an error before anything was sent. ``names``: the client's names of
    grammars."""

    def __init__(self, finish: Finish, names: Mapping[str, str] = MappingProxyType({})) -> None:
        message = finish.message or "the request failed"
        match = _INVALID.match(message)
        param = names.get(match[1], match[1]) if match else None
        super().__init__(message.replace(match[1], str(param), 1) if match else message)
        self.param = param
        self.status = finish.status or (499 if finish.kind == "abort" else EngineError.status)
        self.retry_after_s = finish.retry_after_s
        self.code = finish.code


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error, for responses and for events of a stream."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error} | _flat(message, status, param)


def _flat(message: str, status: int, param: str | None) -> dict[str, Any]:
    """The fields beside ``error`` that clients of SGLang read. ``code`` is the status."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # 499
        phrase = "Client Closed Request"
    kind = phrase.replace(" ", "").removesuffix("Error") + "Error"
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def body_of(error: RadixError) -> dict[str, Any]:
    """The body of a RadixError."""
    status = int(getattr(error, "status", 500))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    body = error_body(str(error), status, param, code)
    details = getattr(error, "details", None)
    if details:
        body["error"]["details"] = dict(details)
    return body


def anthropic_body(error: RadixError | None) -> dict[str, Any]:
    """An error in Anthropic's form; None: an internal error, whose message stays here."""
    if error is None:
        return shaped(error_body("internal error", 500), 500, ANTHROPIC_PATH)
    return shaped(body_of(error), int(getattr(error, "status", 500)), ANTHROPIC_PATH)


def is_anthropic(request: Request) -> bool:
    """Whether the client is Anthropic's, which reads other forms of errors and model cards."""
    return "anthropic-version" in request.headers


def _form_of(request: Request) -> str:
    """The path whose form of errors the client reads."""
    return ANTHROPIC_PATH if is_anthropic(request) else request.url.path


def _renamed(body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The body with the name that the route has for the field."""
    error = body["error"]
    param, message = error["param"], error["message"]
    name = names.get(param or "")
    if name is None:
        return body
    named = {"param": name, "message": message.replace(param, name, 1)}
    return body | named | {"error": error | named}


def shaped(body: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """The body in the form of the route: Anthropic's, Ollama's, else OpenAI's."""
    for prefix, names in _NAMES.items():
        if path.startswith(prefix):
            body = _renamed(body, names)
    if path.startswith(ANTHROPIC_PATH):
        return {"type": "error", "error": body["error"] | {"type": anthropic_type(status)}}
    if path.startswith("/api/"):
        return {"error": body["error"]["message"]}
    return body


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON by orjson; NaN and infinities become null."""
    data = orjson.dumps(body, option=JSON_OPTIONS)
    return Response(data, status, headers, media_type="application/json")


async def json_answer(body: Any) -> Response:
    """``json_response`` for a body that may be large, which is encoded in pieces off the loop."""
    if not is_large(body):
        return json_response(body)
    return StreamingResponse(encoded(body), media_type="application/json")


def error_response(error: RadixError, path: str = "") -> Response:
    """The response to a request to ``path`` that failed with a RadixError."""
    status = int(getattr(error, "status", 500))
    retry_s = getattr(error, "retry_after_s", None)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(retry_s or 1.0)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 501:
        headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic repeat any 5xx
    return json_response(shaped(body_of(error), status, path), status, headers)


def _describe(errors: list[Any]) -> tuple[str, str | None]:
    """(message with one sentence a field, first field) of pydantic's errors."""
    parts: list[str] = []
    first: str | None = None
    for entry in errors[:5]:
        place = ".".join(str(p) for p in entry.get("loc", ()) if p != "body")
        first = first or place or None
        parts.append(f"{place or 'body'}: {entry.get('msg')}")
    return "; ".join(parts), first


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with a JSON error and the status of its type."""

    async def on_radix_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RadixError)
        if int(getattr(error, "status", 500)) >= 500 and not isinstance(error, RequestError):
            log.error("%s %s: %s", request.method, request.url.path, error)
        path = request.url.path
        if getattr(error, "code", None) == QueueFull.code and path.startswith("/v1/"):
            error.status = request.app.state.server.config.serve.queue_full_status  # type: ignore[attr-defined]
        return error_response(error, _form_of(request))

    def response(
        request: Request, status: int, message: str, param: str | None, code: str | None
    ) -> Response:
        body = error_body(message, status, param, code)
        return json_response(shaped(body, status, _form_of(request)), status)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _describe(list(error.errors()))
        return response(request, 400, message, param, "invalid_value")

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, where = error.status_code, f"{request.method} {request.url.path:.200}"
        message = str(error.detail)
        if status == 404:
            message = f"no route {where}"
        elif status == 405:
            message = f"{request.method} is not allowed on {request.url.path:.200}"
        answer = response(request, status, message, None, _CODES.get(status))
        answer.headers.update(error.headers or {})
        return answer

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has left

    async def on_memory(request: Request, error: Exception) -> Response:
        log.error("%s %s: out of memory", request.method, request.url.path)
        return error_response(_NO_MEMORY, _form_of(request))

    async def on_any(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        vars(error)["is_logged"] = True
        return response(request, 500, "internal error", None, None)

    app.add_exception_handler(RadixError, on_radix_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(MemoryError, on_memory)
    app.add_exception_handler(Exception, on_any)
