"""Traces: --enable-trace exports a span a call and one a try to an OpenTelemetry collector.

A call's span is a child of the client's ``traceparent``; each worker gets that of its own try.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from radixlm.observe.tracing import Span, Tracer, open_tracer
from radixlm.router.call import Call, Headers
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import ClientStream, Gateway

_SERVICE = "smg"
_OWN = (b"traceparent", b"tracestate")


def attach(gateway: Gateway) -> None:
    """Trace the data routes, if the options ask for it. ConfigError: a package is missing."""
    options = gateway.options
    if not options.enable_trace:
        return
    traces = Traces(open_tracer(options.otlp_traces_endpoint, _SERVICE))
    gateway.on_start.append(lambda: traces.wrap(gateway))
    gateway.on_stop.append(traces.tracer.close)


class CallTrace:
    """The span of a call and those of its tries, by worker."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self.span = tracer, span
        self._open: dict[str, Span] = {}  # by the worker's name
        self._tries: list[Span] = []

    def told(self, worker: Worker, headers: Headers) -> Headers:
        """A try begins: the headers with its context."""
        span = self._tracer.child(self.span, self.span.name, time.monotonic(), "client")
        span.attributes |= {"server.address": worker.url, "radixlm.worker.type": worker.worker_type}
        if self._tries:
            is_beside = self._tries[-1] in self._open.values()
            span.links.append((self._tries[-1], "beside" if is_beside else "after"))
        self._tries.append(span)
        self._open[worker.name] = span
        return [pair for pair in headers if pair[0] not in _OWN] + span.headers

    def failed(self, worker: Worker, message: str) -> None:
        """The worker gave no whole answer."""
        if worker.name in self._open:
            self._open[worker.name].error = message

    def left(self, worker: Worker, status: int) -> None:
        """A try is over. ``status``: of its answer, 0 without one."""
        span = self._open.pop(worker.name, None)
        if span is None:
            return
        if status:
            span.attributes["http.response.status_code"] = status
        if not status or status >= 500:
            span.error = span.error or (f"status {status}" if status else "no answer")
        self._tracer.end(span)


class Traces:
    """Spans of calls, sent by ``tracer``."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def wrap(self, gateway: Gateway) -> None:
        """Stand before the dispatch. To be called when all parts are attached."""
        serve = gateway.dispatch

        async def traced(gateway: Gateway, call: Call, client: ClientStream) -> None:
            await self.serve(serve, gateway, call, client)

        gateway.dispatch = traced

    async def serve(
        self,
        serve: Callable[[Gateway, Call, ClientStream], Awaitable[None]],
        gateway: Gateway,
        call: Call,
        client: ClientStream,
    ) -> None:
        """Serve a call inside a span."""
        span = self.tracer.begin(f"{call.method} {call.path}", call.headers)
        span.attributes = {
            "http.request.method": call.method,
            "url.path": call.path,
            "request_id": call.request_id,
        }
        call.trace = CallTrace(self.tracer, span)
        try:
            await serve(gateway, call, client)
        except Exception as error:
            span.error = type(error).__name__
            raise
        finally:
            if client.has_begun:
                span.attributes["http.response.status_code"] = client.status
            if call.worker is not None:
                span.attributes |= {"worker": call.worker.name, "num_tries": call.num_tries}
            if not client.has_begun or client.status >= 500:
                span.error = span.error or "no answer"
            self.tracer.end(span)
