"""Gateway: what the parts share, and the way of a call from its connection to its answer."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from radixlm.base.errors import RequestError
from radixlm.base.lazy import load
from radixlm.entrypoints.http.listener import Listener
from radixlm.entrypoints.http.root_path import VERSIONED
from radixlm.router.answer import Access, Routes, error_answer
from radixlm.router.call import Call, Headers
from radixlm.router.client_stream import ClientStream
from radixlm.router.http_server import HttpServer, Limits
from radixlm.router.options import Options
from radixlm.router.parts import PARTS
from radixlm.router.upstream import Upstream

__all__ = ["ClientStream", "Gateway"]

log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None] | None]
Serve = Callable[["Gateway", Call, ClientStream], Awaitable[None]]
Route = Callable[[Call, ClientStream], Awaitable[None]]
Wrapper = Callable[[Serve, Call, ClientStream], Awaitable[None]]
ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_ID_PREFIXES: dict[str | None, str] = (
    {None: "req-"}
    | {
        "chat": "chatcmpl-",
        "completions": "cmpl-",
        "generate": "gnt-",
    }
    | {"responses": "resp-"}
)
_MAX_ID_BYTES = 256
_TYPES = {429: "rate_limit_error", 503: "overloaded_error", 500: "internal_error"}
_ALLOWED_METHODS = b"GET, POST, PUT, DELETE, HEAD, OPTIONS"


class Gateway:
    """One gateway. The parts (``parts.py``) set the attributes that are None here, and register
    routes, listeners and periodic work."""

    def __init__(self, options: Options, parts: tuple[str, ...] = PARTS) -> None:
        """ConfigError: an option cannot be served."""
        self.options = options
        self.upstream = Upstream(
            ca_paths=options.ca_cert_paths,
            cert_path=options.client_cert_path,
            key_path=options.client_key_path,
            connect_timeout_s=options.connect_timeout_secs,
            keep_idle_s=options.pool_idle_timeout_secs,
            max_idle=options.pool_max_idle_per_host,
            tcp_keepalive_s=options.tcp_keepalive_secs,
        )
        self.server = HttpServer(
            partial(self._guarded, self._route), Limits(options.max_payload_size)
        )
        self.routes = Routes()
        self.data_routes: dict[str, str] = {}  # path -> kind
        self.data_wrappers: dict[str, Wrapper] = {}  # path -> what is called in dispatch's place
        self.dispatch: Serve = _no_dispatch
        self.auth: Callable[[Call, Access], Awaitable[None] | None] | None = None
        self.observers: list[Callable[[Call, ClientStream], None]] = []  # at the end of each answer
        self.on_start: list[Work] = []  # before the first call
        self.on_stop: list[Work] = []  # after the last one
        self.registry: Any = None
        self.health: Any = None
        self.policies: Any = None
        self.admission: Any = None
        self.metrics: Any = None
        self.history: Any = None
        self.index: Any = None
        self.drainer: Any = None
        self.hedger: Any = None
        self.dispatcher: Any = None
        self.sessions: Any = None
        self.tokens: Any = None
        self.page: Any = None
        self.servers: Any = None  # those that this gateway has started
        self._periodic: list[tuple[float, Work]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop  # once it runs
        names = options.request_id_headers or ID_HEADERS
        self._id_headers = tuple(name.lower().encode() for name in names)
        self._origins = frozenset(origin.encode() for origin in options.cors_allowed_origins)
        self.every(1.0, self.server.sweep)
        self.every(10.0, self.upstream.sweep)
        for part in parts:
            load(part)(self)

    @property
    def is_draining(self) -> bool:
        """Whether it ends: what runs is finished, nothing new begins."""
        return self.server.is_draining

    def add_data_route(self, path: str, kind: str) -> None:
        """Pass POST requests for ``path`` on to workers. ``kind``: "chat", "generate", ..."""
        self.data_routes[path] = kind

    def every(self, seconds: float, work: Work) -> None:
        """Call ``work`` each ``seconds``, also if it fails."""
        self._periodic.append((seconds, work))
        if self._is_running:
            self.spawn(_repeat(seconds, work))

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine beside all else, until the gateway stops."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work beside the calls failed", exc_info=error)

    # life

    async def start(self, sock: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Begin to serve on a bound socket."""
        self._is_running, self._loop = True, asyncio.get_running_loop()
        for work in self.on_start:
            await _done(work)
        for seconds, work in self._periodic:
            self.spawn(_repeat(seconds, work))
        await self._listen(self.server, sock, context)

    async def open_port(self, sock: socket.socket, routes: Routes) -> None:
        """Serve ``routes``, open to all, on one more socket."""

        def route(call: Call, client: ClientStream) -> Awaitable[None]:
            return _own_route(routes, call, client, None)

        server = HttpServer(partial(self._guarded, route), Limits(1 << 20))
        await self._listen(server, sock, None)

    async def _listen(
        self, server: HttpServer, sock: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        self._listeners.append(Listener(sock, server.make, context=context))

    async def drain(self, grace_s: float) -> bool:
        """Accept no more, close what is idle, wait for the answers under way; whether all ended."""
        for listener in self._listeners:
            listener.close()
        self.server.drain()
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while self.server.num_active and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.02)
        return not self.server.num_active

    async def stop(self) -> None:
        """Drop what still runs, and end all work."""
        for listener in self._listeners:
            listener.close()
        self.server.abort()
        for work in self.on_stop:
            try:
                await _done(work)
            except Exception:
                log.exception("ending %s failed", work)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.upstream.close()

    # calls

    def _route(self, call: Call, client: ClientStream) -> Awaitable[None]:
        """What serves a call. RequestError: it may not be served."""
        if call.path in VERSIONED:
            call.path = f"/v1{call.path}"
        named, path = call.named, call.path
        kind = self.data_routes.get(path) if call.method == "POST" else None
        call.request_id = self._request_id(named, kind)
        client.added_headers.append((b"x-request-id", call.request_id.encode("latin-1")))
        if b"origin" in named:
            client.added_headers += self._cors(named[b"origin"])
        if kind is None:
            return self._serve_own(call, client)
        check = None if self.auth is None else self.auth(call, "key")
        if check is not None or path in self.data_wrappers:
            return self._serve_data(check, call, client)
        return self.dispatch(self, call, client)

    async def _serve_data(
        self, check: Awaitable[None] | None, call: Call, client: ClientStream
    ) -> None:
        if check is not None:
            await check
        wrapper = self.data_wrappers.get(call.path)
        if wrapper is None:
            await self.dispatch(self, call, client)
        else:
            await wrapper(self.dispatch, call, client)

    async def _serve_own(self, call: Call, client: ClientStream) -> None:
        if call.method == "OPTIONS":
            allowed = [(b"allow", _ALLOWED_METHODS)]
            client.begin(200, allowed + _preflight(call), length=0)
            client.end()
        elif call.path in self.data_routes and not self.routes.shown(call.path):
            raise _method_error(call, ["POST"])
        else:
            await _own_route(self.routes, call, client, self.auth)

    async def _guarded(self, route: Route, call: Call, client: ClientStream) -> None:
        """Errors become answers; an answer that has begun is cut."""
        try:
            await route(call, client)
            if not client.has_ended and not client.is_gone:
                raise RuntimeError("the answer has no end")
        except asyncio.CancelledError:
            client.abort()
        except RequestError as error:
            self._fail(call, client, error, error.status, error.message)
        except Exception as error:
            log.exception("%s %s failed", call.method, call.path)
            self._fail(call, client, error, 500, "internal error of the gateway")
        for observe in self.observers:
            try:
                observe(call, client)
            except Exception:
                log.exception("an observer of answers failed")

    def _fail(
        self, call: Call, client: ClientStream, error: Exception, status: int, message: str
    ) -> None:
        if client.has_begun:
            client.abort()
            return
        kind = _TYPES.get(status, "invalid_request_error")
        code = getattr(error, "code", None) or "internal_error"
        param, retry_after_s = getattr(error, "param", None), getattr(error, "retry_after_s", None)
        client.answer(
            error_answer(
                status,
                message,
                code,
                kind=kind,
                param=param,
                retry_after_s=retry_after_s,
                call=call,
            )
        )

    def _request_id(self, named: Mapping[bytes, bytes], kind: str | None) -> str:
        for name in self._id_headers:
            if name in named and (value := named[name]):
                return value[:_MAX_ID_BYTES].decode("latin-1")
        return f"{_ID_PREFIXES.get(kind, 'req-')}{random.getrandbits(96):024x}"

    def _cors(self, origin: bytes) -> Headers:
        if not self._origins or b"*" in self._origins:
            return [(b"access-control-allow-origin", b"*")]
        if origin in self._origins:
            return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        return [(b"vary", b"origin")]


_NOT_BUILT = {
    "/v1/realtime": "live audio is not supported: POST /v1/audio/transcriptions",
    "/v1/interactions": "Gemini's API is not spoken: POST /v1/chat/completions or /v1/responses",
}
"""Routes of other gateways, and why they are not here."""


async def _own_route(
    routes: Routes,
    call: Call,
    client: ClientStream,
    auth: Callable[[Call, Access], Awaitable[None] | None] | None,
) -> None:
    """Serve a call by one of ``routes``; HEAD by that of GET."""
    is_head = call.method == "HEAD"
    if is_head:
        call.method = "GET"
    route = routes.find(call)
    if route is None:
        methods = routes.methods(call.path)
        if methods:
            raise _method_error(call, methods)
        if why := _NOT_BUILT.get(call.path):
            raise _Refusal(501, f"{call.path}: {why}", "not_implemented")
        raise _Refusal(404, f"no route {call.path[:200]!r}", "not_found")
    if route.access != "open" and auth is not None:
        check = auth(call, route.access)
        if check is not None:
            await check
    answer = await route.handler(call)
    if isinstance(answer.body, bytes):
        client.answer(answer)
        return
    kind = (b"content-type", answer.content_type.encode())
    client.begin(answer.status, [kind, *answer.headers])
    may_go_on = asyncio.Event()
    may_go_on.set()
    client.on_pressure(may_go_on.clear, may_go_on.set)
    async for chunk in answer.body:
        client.write(chunk)
        await may_go_on.wait()
    client.end()


class _Refusal(RequestError):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def _method_error(call: Call, methods: list[str]) -> _Refusal:
    message = f"{call.path[:200]} has no {call.method}: use {', '.join(methods)}"
    return _Refusal(405, message, "method_not_supported")


def _preflight(call: Call) -> Headers:
    """What a browser asks before a request to another origin."""
    if call.header(b"access-control-request-method") is None:
        return []
    wanted = call.header(b"access-control-request-headers") or b"*"
    return [
        (b"access-control-allow-methods", _ALLOWED_METHODS),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"3600"),
    ]


async def _done(work: Work) -> None:
    result = work()
    if result is not None:
        await result


async def _repeat(seconds: float, work: Work) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await _done(work)
        except Exception:
            log.exception("periodic work failed")


async def _no_dispatch(gateway: Gateway, call: Call, client: ClientStream) -> None:
    raise _Refusal(503, "no dispatch is attached", "no_available_workers")
