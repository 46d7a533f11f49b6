"""Spans of calls: parents, what the worker is told, failures."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.router import traces
from radixlm.router.traces import Traces
from tests.router.conftest import StartWorkers
from tests.router.front import Front

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_call_is_a_span_between_client_and_worker(start_workers: StartWorkers) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    (worker,) = await start_workers(1)
    exporter = memory.InMemorySpanExporter()
    spans = Traces(export.SimpleSpanProcessor(exporter))
    async with Front([worker]) as front:
        spans.wrap(front.gateway)
        await front.chat(headers=[("traceparent", PARENT)])
        await front.chat()
        await worker.kill()
        assert (await front.chat()).status >= 500
    first, second, third = exporter.get_finished_spans()
    assert (
        first.name == "POST /v1/chat/completions"
        and first.resource.attributes["service.name"] == "smg"
    )
    assert f"{first.context.trace_id:032x}" == PARENT[3:35]
    assert f"{first.parent.span_id:016x}" == PARENT[36:52] and second.parent is None
    assert first.attributes["http.response.status_code"] == 200
    assert (first.attributes["worker"], first.attributes["num_tries"]) == (worker.url, 1)
    assert not third.status.is_ok and first.status.is_unset
    told = [dict(seen.headers) for seen in worker.seen]
    for span, headers in zip((first, second), told, strict=True):
        where = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-0"
        assert _value(headers, "traceparent").startswith(where)
    spans.close()


def _value(headers: dict[Any, Any], name: str) -> str:
    value = headers.get(name) or headers.get(name.encode())
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from radixlm.router.options import Options

    def absent(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr("radixlm.base.lazy.importlib.import_module", absent)
    with pytest.raises(ConfigError, match=r"radixlm\[trace\]"):
        traces.attach(SimpleNamespace(options=Options(enable_trace=True)))  # type: ignore[arg-type]
