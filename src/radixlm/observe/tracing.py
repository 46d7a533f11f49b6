"""Traces: spans are made on the event loop and sent to an OpenTelemetry collector by a thread.

The loop only appends to a bounded queue. The thread turns spans into OTLP with the packages of the
extra ``trace``, so a collector that is slow or dead costs spans, never time of requests.
"""

import atexit
import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from radixlm import __version__
from radixlm.base.lazy import load, require

log = logging.getLogger(__name__)

QUEUE_SPANS = 8192  # that wait for the thread; beyond them spans are dropped and counted
BATCH_SPANS = 512
FLUSH_S = 0.5  # how long a span waits for others
EXPORT_S = 5.0  # a collector may take for a batch
CLOSE_S = 2.0
MAX_STATE_CHARS = 512  # of tracestate, which is passed on
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "opentelemetry.exporter.otlp.proto.{}.trace_exporter"
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_KINDS = {"internal": 0, "server": 1, "client": 2}

Headers = Iterable[tuple[bytes, bytes]]
Attribute = str | int | float | bool | Sequence[str]


class Span:
    """A part of a trace. Times are seconds of the monotonic clock; ``events``: (name, time);
    ``links``: other spans, with how they are related; ``error``: what went wrong, or None."""

    __slots__ = (
        "attributes",
        "end_s",
        "error",
        "events",
        "is_sampled",
        "kind",
        "links",
        "name",
        "parent_id",
        "span_id",
        "start_s",
        "state",
        "trace_id",
    )

    def __init__(self, name: str, kind: str, start_s: float, trace_id: int, parent_id: int) -> None:
        self.name, self.kind, self.start_s, self.end_s = name, kind, start_s, start_s
        self.trace_id, self.parent_id = trace_id, parent_id
        self.span_id = random.getrandbits(64) or 1
        self.is_sampled, self.state = True, b""
        self.attributes: dict[str, Attribute] = {}
        self.events: list[tuple[str, float]] = []
        self.links: list[tuple[Span, str]] = []
        self.error: str | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """W3C's headers that make another server's spans children of this one."""
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"
        state = [(b"tracestate", self.state)] if self.state else []
        return [(b"traceparent", parent.encode()), *state]


class Tracer:
    """Makes spans and exports them. ``exporter``: of the OpenTelemetry SDK; ``service``: the name
    of this program unless OTEL_SERVICE_NAME has another one."""

    def __init__(self, exporter: Any, service: str) -> None:
        self._exporter = exporter
        self._encode = _Encoder(service)
        self._sampler: Any = load("opentelemetry.sdk.trace:TracerProvider")().sampler
        self._always = self._sampler.get_description().startswith("ParentBased{root:AlwaysOn")
        self._queue: deque[Span] = deque()
        self._wake, self._is_closing = threading.Event(), False
        self._is_failing = False
        self.level = 3  # 0: begin no traces; all others are alike
        self.num_dropped = self.num_exported = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def begin(
        self, name: str, headers: Headers = (), kind: str = "server", start_s: float | None = None
    ) -> Span:
        """The first span here of a request: a child of what its ``headers`` name, or a root."""
        found = {key: value for key, value in headers if key in (b"traceparent", b"tracestate")}
        parent = _PARENT.fullmatch(found.get(b"traceparent", b"").strip())
        trace_id, parent_id = (int(parent[2], 16), int(parent[3], 16)) if parent else (0, 0)
        is_child = bool(parent and parent[1] != b"ff" and trace_id and parent_id)
        if not is_child:
            trace_id, parent_id = random.getrandbits(128) or 1, 0
        start_s = time.monotonic() if start_s is None else start_s
        span = Span(name, kind, start_s, trace_id, parent_id)
        is_wanted = bool(parent and is_child and int(parent[4], 16) & 1)
        span.is_sampled = self._is_sampled(span, is_wanted if is_child else None)
        if is_child:
            span.state = found.get(b"tracestate", b"")[:MAX_STATE_CHARS]
        return span

    def _is_sampled(self, span: Span, is_wanted: bool | None) -> bool:
        """By the sampler of OTEL_TRACES_SAMPLER. ``is_wanted``: by the parent, None without one."""
        if not self.level:
            return False
        if self._always:
            return is_wanted is not False
        api = require("opentelemetry.trace", "trace", "--enable-trace")
        context = None
        if is_wanted is not None:
            flags = api.TraceFlags(int(is_wanted))
            above = api.SpanContext(span.trace_id, span.parent_id, True, flags)
            context = api.set_span_in_context(api.NonRecordingSpan(above))
        found = self._sampler.should_sample(context, span.trace_id, span.name)
        return bool(found.decision.is_sampled())

    def child(self, parent: Span, name: str, start_s: float, kind: str = "internal") -> Span:
        """A span below ``parent``, to be ended."""
        span = Span(name, kind, start_s, parent.trace_id, parent.span_id)
        span.is_sampled, span.state = parent.is_sampled, parent.state
        return span

    def end(self, span: Span, end_s: float | None = None) -> None:
        """Export a span that is over."""
        span.end_s = max(span.start_s, time.monotonic() if end_s is None else end_s)
        if not span.is_sampled:
            return
        if len(self._queue) >= QUEUE_SPANS:
            self.num_dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) == BATCH_SPANS:
            self._wake.set()

    def close(self) -> None:
        """Send what is left, for at most 2 s."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_closing or self._queue:
            self._wake.wait(FLUSH_S)
            if not self._is_closing:
                self._wake.clear()
            while self._queue:
                count = min(len(self._queue), BATCH_SPANS)
                self._export([self._queue.popleft() for _ in range(count)])

    def _export(self, spans: list[Span]) -> None:
        try:
            is_sent = self._exporter.export(self._encode(spans)).value == 0
        except Exception as error:  # of a library that talks to a network
            log.debug("traces: %s", error)
            is_sent = False
        if is_sent:
            self.num_exported += len(spans)
        else:
            self.num_dropped += len(spans)
        if is_sent == self._is_failing:  # it has changed
            self._is_failing = not is_sent
            if is_sent:
                log.info("traces: the collector answers; %d spans were dropped", self.num_dropped)
            else:
                log.warning("traces: the collector does not answer; spans are dropped")


class _Encoder:
    """Turns spans into those of the SDK."""

    def __init__(self, service: str) -> None:
        self._api = require("opentelemetry.trace", "trace", "--enable-trace")
        self._sdk = require("opentelemetry.sdk.trace", "trace", "--enable-trace")
        about = {"service.version": __version__, "process.pid": os.getpid()}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = service
        self._resource = load("opentelemetry.sdk.resources:Resource").create(about)
        scope = load("opentelemetry.sdk.util.instrumentation:InstrumentationScope")
        self._scope = scope("radixlm", __version__)
        self._kinds = {name: self._api.SpanKind(number) for name, number in _KINDS.items()}

    def __call__(self, spans: list[Span]) -> list[Any]:
        base_ns = time.time_ns() - time.monotonic_ns()
        return [self._one(span, base_ns) for span in spans]

    def _context(self, trace_id: int, span_id: int, state: bytes = b"") -> Any:
        told = self._api.TraceState.from_header([state.decode("latin-1")]) if state else None
        return self._api.SpanContext(trace_id, span_id, False, self._api.TraceFlags(1), told)

    def _one(self, span: Span, base_ns: int) -> Any:
        def at(seconds: float) -> int:
            return base_ns + int(seconds * 1e9)

        status = self._api.Status()
        if span.error is not None:
            status = self._api.Status(self._api.StatusCode.ERROR, span.error)
        parent = self._context(span.trace_id, span.parent_id) if span.parent_id else None
        events = [self._sdk.Event(name, timestamp=at(time_s)) for name, time_s in span.events]
        links = [
            self._api.Link(self._context(o.trace_id, o.span_id), {"radixlm.relation": how})
            for o, how in span.links
        ]
        return self._sdk.ReadableSpan(
            span.name, self._context(span.trace_id, span.span_id, span.state), parent,
            self._resource, span.attributes, events, links, self._kinds[span.kind],
            status=status, start_time=at(span.start_s), end_time=at(span.end_s),
            instrumentation_scope=self._scope,
        )  # fmt: skip


def open_tracer(endpoint: str, service: str) -> Tracer:
    """A tracer that sends to ``endpoint``: host:port or a URL, by gRPC or, with
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, by HTTP. ConfigError: a package is missing."""
    why = "--enable-trace"
    require("opentelemetry.sdk.trace", "trace", why)
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL + 1)  # told once, here
    if protocol.startswith("http"):
        exporters = require(_EXPORTER.format("http"), "trace", why)
        url = endpoint if "://" in endpoint else f"http://{endpoint}/v1/traces"
        return Tracer(exporters.OTLPSpanExporter(url, timeout=EXPORT_S), service)
    exporters = require(_EXPORTER.format("grpc"), "trace", why)
    is_plain = None if "://" in endpoint else True
    return Tracer(exporters.OTLPSpanExporter(endpoint, is_plain, timeout=EXPORT_S), service)
