"""The tracer against real collectors: contexts, batches, sampling, and a collector that is dead."""

from __future__ import annotations

import logging
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.otlp import Collector, HttpCollector, values

from radixlm.base.errors import ConfigError
from radixlm.observe import tracing
from radixlm.observe.tracing import Tracer, open_tracer

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("kind", [Collector, HttpCollector])
def test_spans_arrive_as_they_were_made(
    kind: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is HttpCollector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    began_ns = time.time_ns()
    with kind() as collector:
        tracer = open_tracer(collector.endpoint, "one")
        span = tracer.begin("call", [(b"traceparent", PARENT), (b"tracestate", b"a=b")])
        child = tracer.child(span, "part", span.start_s, "client")
        child.attributes, child.error = {"n": 3, "words": ["x", "y"]}, "it broke"
        child.events.append(("first token", child.start_s))
        child.links.append((span, "after"))
        tracer.end(child)
        tracer.end(span)
        tracer.close()
        (got,), (part,) = collector.wait_for("call"), collector.wait_for("part")
    assert got.trace_id.hex() == part.trace_id.hex() == PARENT[3:35].decode()
    assert got.parent_span_id.hex() == PARENT[36:52].decode() and got.trace_state == "a=b"
    assert part.parent_span_id == got.span_id and (got.kind, part.kind) == (2, 3)
    assert values(part.attributes) == {"n": 3, "words": ["x", "y"]}
    assert (part.status.code, part.status.message, got.status.code) == (2, "it broke", 0)
    assert part.events[0].name == "first token" and part.links[0].span_id == got.span_id
    assert values(part.links[0].attributes) == {"radixlm.relation": "after"}
    assert began_ns <= got.start_time_unix_nano <= part.end_time_unix_nano <= time.time_ns()
    assert collector.resources[0]["service.name"] == "one"
    assert (tracer.num_exported, tracer.num_dropped) == (2, 0)


def _tracer(results: list[bool] | None = None) -> tuple[Tracer, list[Any]]:
    """A tracer whose exporter keeps the spans, or fails where ``results`` says so."""
    taken: list[Any] = []

    def export(spans: Any) -> Any:
        is_good = results.pop(0) if results else True
        taken.extend(spans if is_good else ())
        return SimpleNamespace(value=0 if is_good else 1)

    return Tracer(SimpleNamespace(export=export, shutdown=lambda: None), "test"), taken


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00-0-1-01",
        b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"00-00000000000000000000000000000000-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        b"00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
    ],
)
def test_a_parent_that_is_none_begins_a_trace(parent: bytes) -> None:
    tracer, taken = _tracer()
    span = tracer.begin("call", [(b"traceparent", parent), (b"tracestate", b"a=b")])
    tracer.end(span)
    tracer.close()
    assert span.parent_id == 0 and f"{span.trace_id:032x}" != PARENT[3:35].decode()
    assert [name for name, _ in span.headers] == [b"traceparent"] and len(taken) == 1


def test_what_the_caller_does_not_sample_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, taken = _tracer()
    span = tracer.begin("call", [(b"traceparent", PARENT[:-1] + b"0")])
    part = tracer.child(span, "part", 0.0)
    tracer.end(part)
    tracer.end(span)
    tracer.close()
    assert taken == [] and span.headers[0][1].endswith(b"-00")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer, taken = _tracer()
    tracer.end(tracer.begin("root"))
    tracer.end(tracer.begin("asked for", [(b"traceparent", PARENT)]))
    tracer.close()
    assert [span.name for span in taken] == ["asked for"]


def test_a_dead_collector_costs_spans_and_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "QUEUE_SPANS", 5)
    tracer, taken = _tracer([False, False])
    exported = threading.Semaphore(0)
    export = tracer._export
    monkeypatch.setattr(tracer, "_export", lambda spans: (export(spans), exported.release()))
    with caplog.at_level(logging.INFO, "radixlm.observe.tracing"):
        for _ in range(3):
            tracer.end(tracer.begin("call"))
            tracer._wake.set()
            assert exported.acquire(timeout=10)
        tracer.close()
    assert (len(taken), tracer.num_dropped, tracer.num_exported) == (1, 2, 1)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    before = tracer.num_dropped
    for _ in range(8):  # nobody empties the queue any more
        tracer.end(tracer.begin("call"))
    assert tracer.num_dropped == before + 3


def test_a_port_where_nobody_listens_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        tracer = open_tracer(f"127.0.0.1:{sock.getsockname()[1]}", "test")
        began_s = time.monotonic()
        for _ in range(1000):
            tracer.end(tracer.begin("call"))
        assert time.monotonic() - began_s < 0.5
        monkeypatch.setattr(tracing, "CLOSE_S", 0.3)
        tracer.close()
        assert time.monotonic() - began_s < 2
        assert tracer.num_exported == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr("radixlm.base.lazy.importlib.import_module", absent)
    with pytest.raises(ConfigError, match=r"radixlm\[trace\]"):
        open_tracer("localhost:4317", "test")
