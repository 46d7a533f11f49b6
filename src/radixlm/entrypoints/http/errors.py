"""Errors -> HTTP, in one place. Bodies have OpenAI's nested form: {"error": {message, ...}}."""

from __future__ import annotations

import errno
import logging
import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from radixlm.base.errors import EngineError, RadixError, RequestError
from radixlm.wire.fields import FIELDS, renames
from radixlm.wire.replies import Finish
from radixlm.wire.sampling_params import SAMPLING_FIELDS

log = logging.getLogger(__name__)

# OpenAI says "invalid_request_error" of keys, names and sizes too; ``code`` tells them apart
_TYPES = {429: "requests", 501: "not_supported_error"}
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}
_CODES = {405: "method_not_supported"}
# what is checked under chat's names, in those of the routes that are made into chats
_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/responses": renames("chat", "responses", SAMPLING_FIELDS, FIELDS),
    ANTHROPIC_PATH: renames("chat", "messages", SAMPLING_FIELDS, FIELDS),
    "/api/": renames("chat", "ollama", FIELDS)
    | renames("chat", "ollama_options", SAMPLING_FIELDS)
    | {"max_tokens": "num_predict"},
}


# what the engine says of a grammar that it cannot compile
_INVALID = re.compile(r"invalid (json_schema|json_object|regex|ebnf|structural_tag|lark)\b")


_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFull(RadixError):
    """507 Insufficient Storage."""

    status = 507
    code = "insufficient_storage"


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk has no room; of several errors at once, whether one says so."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_disk_full(inner) for inner in error.exceptions)
    if isinstance(error, sqlite3.Error):
        return "full" in str(error)
    return isinstance(error, OSError) and error.errno in _DISK_FULL


class FinishError(RadixError):
    """A request that ended in an error before anything was sent."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.message or "the request failed")
        self.status = finish.status or (499 if finish.kind == "abort" else EngineError.status)
        self.retry_after_s = finish.retry_after_s
        found = _INVALID.match(str(self))
        self.param = found.group(1) if found else None


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error, for answers and for events in mid-stream."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RadixError) -> dict[str, Any]:
    """The body of one of our errors."""
    status = int(getattr(error, "status", 500))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    body = error_body(str(error), status, param, code)
    details = getattr(error, "details", None)
    if details:
        body["error"]["details"] = dict(details)
    return body


def anthropic_body(error: RadixError | None) -> dict[str, Any]:
    """An error in Anthropic's form; None: one of ours that no client may see."""
    if error is None:
        return shaped(error_body("internal error", 500), 500, ANTHROPIC_PATH)
    return shaped(body_of(error), int(getattr(error, "status", 500)), ANTHROPIC_PATH)


def _in_words_of(body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The body with the name that a route has for the field."""
    found = body["error"]
    ours, message = found["param"], found["message"]
    theirs = names.get(ours or "")
    if theirs is None or not message.startswith(ours):
        return body
    return body | {"error": found | {"param": theirs, "message": theirs + message[len(ours) :]}}


def shaped(body: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """The body as clients of ``path`` read errors: Anthropic's, Ollama's, else OpenAI's."""
    for beginning, names in _NAMES.items():
        if path.startswith(beginning):
            body = _in_words_of(body, names)
    if path.startswith(ANTHROPIC_PATH):
        kind = "invalid_request_error" if status < 500 else "api_error"
        found = body["error"] | {"type": _ANTHROPIC.get(status, kind)}
        return {"type": "error", "error": found}
    if path.startswith("/api/"):
        return {"error": body["error"]["message"]}
    return body


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON by orjson; numbers that JSON cannot say become null."""
    data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(data, status, headers, media_type="application/json")


def error_response(error: RadixError, path: str = "") -> Response:
    """The answer to a request to ``path`` that failed with one of our errors."""
    status = int(getattr(error, "status", 500))
    retry_s = getattr(error, "retry_after_s", None)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(retry_s or 1.0)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(shaped(body_of(error), status, path), status, headers)


def _describe(errors: list[Any]) -> tuple[str, str | None]:
    """Pydantic's findings as one sentence a field."""
    parts: list[str] = []
    first: str | None = None
    for found in errors[:5]:
        place = ".".join(str(p) for p in found.get("loc", ()) if p != "body")
        first = first or place or None
        parts.append(f"{place or 'body'}: {found.get('msg')}")
    return "; ".join(parts), first


def add_handlers(app: FastAPI) -> None:
    """Every exception becomes a JSON error with the status that its type says."""

    async def on_radix_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RadixError)
        if int(getattr(error, "status", 500)) >= 500 and not isinstance(error, RequestError):
            log.error("%s %s: %s", request.method, request.url.path, error)
        return error_response(error, request.url.path)

    def refuse(
        request: Request, status: int, message: str, param: str | None, code: str | None
    ) -> Response:
        body = error_body(message, status, param, code)
        return json_response(shaped(body, status, request.url.path), status)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _describe(list(error.errors()))
        return refuse(request, 400, message, param, "invalid_value")

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, where = error.status_code, f"{request.method} {request.url.path:.200}"
        message = str(error.detail)
        if status == 404:
            message = f"no route {where}"
        elif status == 405:
            message = f"{request.method} is not allowed on {request.url.path:.200}"
        answer = refuse(request, status, message, None, _CODES.get(status))
        answer.headers.update(error.headers or {})
        return answer

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_any(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return refuse(request, 500, "internal error", None, None)

    app.add_exception_handler(RadixError, on_radix_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(Exception, on_any)
