"""Spans of calls: parents, what the worker is told, failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.observe.tracing import Tracer
from radixlm.router import traces
from radixlm.router.traces import Traces
from tests.router.client import until
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.test_pd import PdFront

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_call_is_a_span_between_client_and_worker(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    spans, taken = _traces()
    async with Front(workers) as front:
        spans.wrap(front.gateway)
        await front.chat(headers=[("traceparent", PARENT)])
        await workers[1].kill()
        await front.chat()
        await workers[0].kill()
        assert (await front.chat()).status >= 500
    spans.tracer.close()
    first, second, third = [span for span in taken if span.parent is None or span.kind.value == 1]
    assert first.name == "POST /v1/chat/completions"
    assert first.resource.attributes["service.name"] == "smg"
    assert f"{first.context.trace_id:032x}" == PARENT[3:35]
    assert f"{first.parent.span_id:016x}" == PARENT[36:52] and second.parent is None
    assert first.attributes["http.response.status_code"] == 200
    assert (first.attributes["worker"], first.attributes["num_tries"]) == (workers[0].url, 1)
    assert not third.status.is_ok and first.status.is_unset and second.status.is_unset

    def tries(call: Any) -> list[Any]:
        return [s for s in taken if s.parent and s.parent.span_id == call.context.span_id]

    ((one,), (lost, other)) = tries(first), tries(second)
    assert not lost.status.is_ok and lost.attributes["server.address"] == workers[1].url
    assert other.status.is_unset and other.attributes["http.response.status_code"] == 200
    (link,) = other.links
    assert link.context.span_id == lost.context.span_id
    assert link.attributes == {"radixlm.relation": "after"} and not one.links
    told = [_value(dict(seen.headers), "traceparent") for seen in workers[0].seen]
    for span, value in zip((one, other), told, strict=True):
        assert value == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


async def test_the_halves_of_a_pair_are_linked(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2)
    spans, taken = _traces()
    async with PdFront([prefill], [decode]) as front:
        spans.wrap(front.gateway)
        await front.chat(headers=[("traceparent", PARENT)])
        await until(lambda: front.is_idle)
    spans.tracer.close()
    halves = {s.attributes["radixlm.worker.type"]: s for s in taken if s.kind.value == 2}
    assert set(halves) == {"prefill", "decode"}
    (link,) = halves["decode"].links
    assert link.context.span_id == halves["prefill"].context.span_id
    assert link.attributes == {"radixlm.relation": "beside"} and not halves["prefill"].links
    for worker, kind in ((prefill, "prefill"), (decode, "decode")):
        told = _value(dict(worker.seen[0].headers), "traceparent")
        assert told == f"{PARENT[:36]}{halves[kind].context.span_id:016x}-01"


def _traces() -> tuple[Traces, list[Any]]:
    """Traces and the spans that they have sent."""
    taken: list[Any] = []

    def export(spans: Any) -> Any:
        taken.extend(spans)
        return SimpleNamespace(value=0)

    return Traces(Tracer(SimpleNamespace(export=export, shutdown=lambda: None), "smg")), taken


def _value(headers: dict[Any, Any], name: str) -> str:
    value = headers.get(name) or headers.get(name.encode())
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixlm.router.options import Options

    def absent(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr("radixlm.base.lazy.importlib.import_module", absent)
    with pytest.raises(ConfigError, match=r"radixlm\[trace\]"):
        traces.attach(SimpleNamespace(options=Options(enable_trace=True)))  # type: ignore[arg-type]
