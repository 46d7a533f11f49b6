"""Traces: --enable-trace exports a span a call to an OpenTelemetry collector, by OTLP over gRPC.

The span is a child of the client's ``traceparent``, and the worker gets the span's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load, require
from radixlm.router.call import Call

if TYPE_CHECKING:
    from radixlm.router.app import ClientStream, Gateway

_SERVICE = "smg"
_API, _SDK = "opentelemetry", "opentelemetry.sdk.trace"
_FLUSH_MS = 2000


def attach(gateway: Gateway) -> None:
    """Trace the data routes, if the options ask for it. ConfigError: a package is missing."""
    options = gateway.options
    if not options.enable_trace:
        return
    exporters = require(
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "trace", "--enable-trace"
    )
    require("opentelemetry.sdk", "trace", "--enable-trace")
    exporter = exporters.OTLPSpanExporter(options.otlp_traces_endpoint, insecure=True)
    traces = Traces(load(f"{_SDK}.export:BatchSpanProcessor")(exporter))
    gateway.on_start.append(lambda: traces.wrap(gateway))
    gateway.on_stop.append(traces.close)


class Traces:
    """Spans of calls. ``processor``: takes the spans that have ended."""

    def __init__(self, processor: Any) -> None:
        resource = load("opentelemetry.sdk.resources:Resource").create({"service.name": _SERVICE})
        self._provider: Any = load(f"{_SDK}:TracerProvider")(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("radixlm.router")
        self._context: Any = load(
            f"{_API}.trace.propagation.tracecontext:TraceContextTextMapPropagator"
        )()
        self._kind: Any = load(f"{_API}.trace:SpanKind").SERVER
        self._with_span: Any = load(f"{_API}.trace:set_span_in_context")
        self._error: Any = load(f"{_API}.trace:StatusCode").ERROR

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
        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers}
        about = {
            "http.request.method": call.method,
            "url.path": call.path,
            "request_id": call.request_id,
        }
        parent = self._context.extract(sent)
        span = self._tracer.start_span(
            f"{call.method} {call.path}", parent, self._kind, attributes=about
        )
        told: dict[str, str] = {}
        self._context.inject(told, self._with_span(span))
        kept = [pair for pair in call.headers if pair[0] not in (b"traceparent", b"tracestate")]
        call.headers = kept + [(name.encode(), value.encode()) for name, value in told.items()]
        try:
            await serve(gateway, call, client)
        except Exception as error:
            span.record_exception(error)
            raise
        finally:
            if client.has_begun:
                span.set_attribute("http.response.status_code", client.status)
            if call.worker is not None:
                span.set_attribute("worker", call.worker.name)
                span.set_attribute("num_tries", call.num_tries)
            if not client.has_begun or client.status >= 500:
                span.set_status(self._error)
            span.end()

    def close(self) -> None:
        """Send what is left, at most 2 s."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
