"""Traces of calls (--enable-trace): a span each, below which intake puts those of its sequences."""

from __future__ import annotations

from typing import Any

from radixlm.entrypoints.http.access import QUIET_PATHS
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.middleware import App, Receive, Scope, Send
from radixlm.entrypoints.http.state import ServerState
from radixlm.live_feed.rows import RequestRows
from radixlm.live_feed.tracing import call_span, trace_intake
from radixlm.observe.tracing import Tracer


class TraceMiddleware:
    """Makes the span of each POST, as a child of the client's ``traceparent``."""

    def __init__(self, app: App, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.begin("POST", scope["headers"])
        span.attributes = {"http.request.method": "POST", "url.path": scope["path"][:200]}
        call_span.set(span)
        status = 0

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            route = getattr(scope.get("route"), "path", None)
            span.name = f"POST {route or 'unknown'}"
            if route:
                span.attributes["http.route"] = route
            if status:
                span.attributes["http.response.status_code"] = status
            if not status or status >= 500:
                span.error = f"status {status}" if status else "no answer"
            self._tracer.end(span)


def install(app: Any, state: ServerState) -> None:
    """Trace requests from now on. ConfigError: a package is missing."""
    rows = state.extras.get(RequestRows)  # None with --disable-ui
    tracer = state.extras[Tracer] = trace_intake(
        state.intake,
        state.config.observe.oltp_traces_endpoint,
        state.model_name,
        rows,
        PROBE_PREFIX,
    )
    app.add_middleware(TraceMiddleware, tracer=tracer)
