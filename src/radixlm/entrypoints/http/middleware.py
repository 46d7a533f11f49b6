"""The ASGI middleware in front of all routes: API keys, body size, request ids, full disks.

It is plain ASGI, so that it does not buffer streams.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from radixlm.base.errors import (
    ConfigError,
    Forbidden,
    PayloadTooLarge,
    RadixError,
    Unauthorized,
)
from radixlm.config.serve import ServeConfig
from radixlm.continuation.stream_journal import begin_journal
from radixlm.entrypoints.client import set_client
from radixlm.entrypoints.http.access import Access, begin_access
from radixlm.entrypoints.http.browser_guard import LOOPBACK_NAMES, BrowserGuard, is_streamed
from radixlm.entrypoints.http.errors import (
    ANTHROPIC_PATH,
    disk_fault,
    error_response,
)
from radixlm.entrypoints.http.ui import wants_page
from radixlm.intake.call import begin_call, current_call
from radixlm.intake.identity import Identity, identity, owner_of, set_identity
from radixlm.wire.unknown import IgnoredFields, collect_unknown

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready", "/health_generate", "/ping", "/metrics", "/v1/health"})
# routes that change the server, or show what other clients send
ADMIN_PATHS = frozenset(
    "/dump_requests /debug/stacks "
    "/flush_cache /reset_prefix_cache /kv_snapshot "
    "/set_internal_state /slow_down /freeze_gc /configure_logging /pause_generation "
    "/continue_generation /update_weights_from_disk /init_weights_update_group "
    "/destroy_weights_update_group /update_weights_from_tensor /update_weights_from_distributed "
    "/update_weight_version /release_memory_occupation /resume_memory_occupation /sleep /wake_up "
    "/start_profile "
    "/stop_profile /load_lora_adapter /unload_lora_adapter /get_weights_by_name "
    "/v1/load_lora_adapter /v1/unload_lora_adapter "
    "/start_expert_distribution_record /stop_expert_distribution_record "
    "/dump_expert_distribution_record /clear_hicache_storage_backend "
    "/hicache/storage-backend/clear /hicache/storage-backend /update_weights_from_ipc "
    "/begin_weight_update /end_weight_update /weights_checker /set_trace_level /pd_role_switch "
    "/load_lora_adapter_from_tensors /add_external_corpus /remove_external_corpus "
    "/list_external_corpora "
    "/weights_files /remote_instance_transfer_engine_info "
    "/get_remote_instance_transfer_engine_info "
    "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance".split()
)
LIVE_PATHS = "/live/"  # of administrators too; a browser reads them
JOURNAL_HEADER = b"x-radixlm-journal"
MAX_REQUEST_ID = 128
MAX_KEY_CHARS = 256
_request_name: ContextVar[str | None] = ContextVar("request_id", default=None)


def fair_share_key() -> str | None:
    """The client of the running call, who shares the server evenly with others."""
    call = current_call()
    return None if call is None else call.client


def request_id() -> str | None:
    """The X-Request-Id of the HTTP request that is answered; None outside of one."""
    return _request_name.get()


def set_request_id(name: str) -> None:
    """The HTTP request goes on with another one, whose id was ``name``."""
    _request_name.set(_checked_id(name))


def forget_request_id() -> None:
    """What runs from here on is work of its own: its requests have ids and times of their own."""
    _request_name.set(None)
    begin_journal(None)


class StreamCut(Exception):
    """End the connection amid the answer: a gateway goes on with the stream elsewhere."""


class RequestMiddleware:
    """Checks a request before it reaches a route."""

    def __init__(self, app: App, serve: ServeConfig, fair_header: str | None = None) -> None:
        self._app = app
        self._identities = _identities(serve)
        self._guard = BrowserGuard(serve, _needs_key(serve), ADMIN_PATHS)
        self._anonymous = Identity(is_admin=not self._identities)
        self._fair_header = fair_header.lower().encode("latin-1") if fair_header else None
        self._needs_key = _needs_key(serve)
        self._has_admin_key = bool(serve.admin_api_key)
        self._is_local = serve.host in LOOPBACK_NAMES
        self._max_bytes = serve.max_request_bytes
        self._unknown_fields = serve.unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = begin_access(scope)
        try:
            with collect_unknown(self._unknown_fields) as ignored:
                await self._answer(scope, receive, send, ignored, access)
        except Exception:  # the server answers it
            if access is not None:
                access.status = 500
            raise
        finally:
            if access is not None:
                access.end(request_id())

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        ignored: IgnoredFields,
        access: Access | None,
    ) -> None:
        headers = dict(scope["headers"])
        name = _request_id(headers)
        _request_name.set(name)
        begin_journal(name if headers.get(JOURNAL_HEADER) == b"1" else None)
        send = _with_headers(send, name, scope["path"], ignored, access)
        try:
            self._check(scope, headers)
        except RadixError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        client = self._client(scope, headers)
        set_client(client)
        call = begin_call(self._fair_user(headers) or client)
        call.route, call.headers = scope["path"], headers
        limited, started = receive, _Started(send)
        if not is_streamed(scope["path"], headers):
            limited = Limited(receive, self._max_bytes)
        try:
            await self._app(scope, limited, started)
        except StreamCut as cut:
            log.info("%s %s: cut for a gateway: %s", scope["method"], scope["path"], cut)
        except PayloadTooLarge as error:
            await error_response(error, scope["path"])(scope, receive, send)
        except (OSError, sqlite3.Error) as error:
            fault = disk_fault(error, scope["path"])
            if started.is_begun or fault is None:
                raise
            log.error("%s %s: %s: %s", scope["method"], scope["path"], fault, error)
            await error_response(fault, scope["path"])(scope, receive, send)

    def _fair_user(self, headers: dict[bytes, bytes]) -> str | None:
        """The user that the header of --fair-share names."""
        value = headers.get(self._fair_header) if self._fair_header is not None else None
        return value.decode("latin-1")[:MAX_KEY_CHARS] if value else None

    def _client(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """A name for the client: its key where keys are checked, the header of --fair-share, or its
        address. Keys that nobody checks tell nothing: a client could send a new one each time."""
        if identity().owner:
            return f"key {identity().owner}"
        peer = scope.get("client")
        return self._fair_user(headers) or (f"address {peer[0]}" if peer else "")

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        is_large = length.isdigit() and int(length) > self._max_bytes
        if is_large and not is_streamed(scope["path"], headers):
            raise PayloadTooLarge(
                f"the body has {int(length)} bytes, the limit is {self._max_bytes} "
                "(--max-request-bytes)"
            )
        path = scope["path"].rstrip("/") or "/"
        set_identity(self._anonymous)
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS or _is_page(scope, headers):
            return
        self._guard.check(scope["method"], path, headers)
        if path == "/ui/info":
            return
        known = _matching(_bearer(headers), self._identities)
        if path in ADMIN_PATHS or path.startswith(LIVE_PATHS):
            self._check_admin(known)
        elif self._needs_key and known is None:
            raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer KEY")
        set_identity(known or self._anonymous)

    def _check_admin(self, known: Identity | None) -> None:
        """Admin routes need --admin-api-key if it is set, else --api-key or the only key of
        --api-key-file; without keys they are open only on a server that listens on loopback."""
        if self._has_admin_key:
            if known is None or not known.is_admin:
                raise Unauthorized("this route needs the admin key (--admin-api-key)")
        elif self._needs_key:
            if known is None:
                raise Unauthorized(
                    "the API key is missing or wrong: send Authorization: Bearer KEY"
                )
            if not known.is_admin:
                raise Forbidden(
                    "this route changes the server for clients with other keys: "
                    "start with --admin-api-key KEY"
                )
        elif not self._is_local:
            raise Forbidden(
                "this route changes the server and is closed on a public address: "
                "start with --admin-api-key KEY"
            )


def _is_page(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Whether a static file of the page answers, also to links of other sites."""
    accept = headers.get(b"accept", b"").decode("latin-1")
    return scope["method"] in ("GET", "HEAD") and wants_page(scope["path"], accept)


class _Started:
    """Records whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_begun = send, False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.is_begun = True
        await self._send(message)


class Limited:
    """Counts the body's bytes, for clients that send no Content-Length. ``hint``: of the error."""

    def __init__(
        self, receive: Receive, max_bytes: int, hint: str = " (--max-request-bytes)"
    ) -> None:
        self._receive, self._left, self._max_bytes = receive, max_bytes, max_bytes
        self._hint = hint

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise PayloadTooLarge(f"the body exceeds {self._max_bytes} bytes{self._hint}")
        return message


def _needs_key(serve: ServeConfig) -> bool:
    """Whether ordinary routes need a key."""
    return bool(serve.api_key or serve.api_key_file)


def _identities(serve: ServeConfig) -> dict[str, Identity]:
    """The identity of each key that is accepted. The operator's key sees the objects of all:
    --admin-api-key, else --api-key, else the only one of --api-key-file."""
    keys = _keys(serve)
    operator = serve.admin_api_key or serve.api_key or (keys[0] if len(keys) == 1 else None)
    has_own_cache = serve.isolate_cache_by == "key"
    return {
        key: Identity(owner_of(key), key == operator, has_own_cache)
        for key in (*keys, *filter(None, [serve.admin_api_key]))
    }


def _keys(serve: ServeConfig) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file."""
    keys = [serve.api_key] if serve.api_key else []
    if serve.api_key_file:
        try:
            lines = Path(serve.api_key_file).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"--api-key-file {serve.api_key_file}: {error.strerror}") from error
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"--api-key-file {serve.api_key_file}: the file holds no key")
    return tuple(keys)


def _bearer(headers: dict[bytes, bytes]) -> str:
    """The key of ``Authorization: Bearer``, or of ``x-api-key`` (Anthropic's clients)."""
    value = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, key = value.partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1")


def _matching(sent: str, identities: dict[str, Identity]) -> Identity | None:
    """The identity of a key: a constant-time comparison with every key."""
    found = None
    for key, known in identities.items():
        if hmac.compare_digest(sent.encode(), key.encode()):
            found = known
    return found


def _request_id(headers: dict[bytes, bytes]) -> str:
    return _checked_id(headers.get(b"x-request-id", b"").decode("latin-1"))


def _checked_id(sent: str) -> str:
    if sent and len(sent) <= MAX_REQUEST_ID and sent.isprintable() and sent.isascii():
        return sent
    return secrets.token_hex(8)


def _with_headers(
    send: Send, request_id: str, path: str, ignored: IgnoredFields, access: Access | None
) -> Send:
    names = [b"x-request-id"]
    if path.startswith(ANTHROPIC_PATH):
        names.append(b"request-id")
    value = request_id.encode("latin-1")

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if access is not None:
                access.status = message["status"]
            added = [(name, value) for name in names]
            if ignored.header:
                added.append((b"x-radixlm-ignored", ignored.header.encode()))
            if ignored.warning:
                added.append((b"x-radixlm-warning", ignored.warning.encode()))
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return wrapped
