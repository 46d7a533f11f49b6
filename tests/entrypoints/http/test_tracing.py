"""A request's trace, from the client's context to the last token, at a real OTLP collector."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.http_server import scripted_server
from tests.fakes.otlp import Collector, values

from radixlm.observe.tracing import Tracer

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "secret words"}]}
PHASES = ["tokenize", "queue", "prefill", "decode"]


def _server(folder: Any, collector: Collector) -> Any:
    options = {"enable_trace": True, "oltp_traces_endpoint": collector.endpoint}
    return scripted_server(folder, {}, **options)


async def test_a_request_is_a_trace(toy_folder: Any) -> None:
    with Collector() as collector:
        async with _server(toy_folder, collector) as made:
            body = CHAT | {"temperature": 0.5, "max_tokens": 3, "seed": 11, "stream": True}
            headers = {"traceparent": PARENT}
            got = await made.client.post("/v1/chat/completions", json=body, headers=headers)
            assert got.status_code == 200
            await made.client.get("/health")
            got = await made.client.get("/set_trace_level?level=0")
            assert got.status_code == 200 and got.text == "success"
            await made.client.post("/v1/chat/completions", json=body, headers=headers)
            made.state.extra(Tracer).close()
        (call,) = collector.wait_for("POST /v1/chat/completions")
        (sequence,) = collector.wait_for("chat tiny")
    assert call.trace_id.hex() == TRACE and call.parent_span_id.hex() == "b7ad6b7169203331"
    assert values(call.attributes) == {
        "http.request.method": "POST", "url.path": "/v1/chat/completions",
        "http.route": "/v1/chat/completions", "http.response.status_code": 200,
    }  # fmt: skip
    assert collector.below(call) == [sequence] and len(collector.spans) == 7
    parts = collector.below(sequence)
    assert [part.name for part in parts if part.name != "detokenize"] == PHASES
    assert len(parts) == 5
    queue, prefill, decode = (collector.named(name)[0] for name in PHASES[1:])
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert call.start_time_unix_nano <= sequence.start_time_unix_nano
    about = values(sequence.attributes)
    assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.request.model"] == "tiny"
    assert about["gen_ai.request.temperature"] == 0.5 and about["gen_ai.request.seed"] == 11
    assert about["gen_ai.request.max_tokens"] == about["gen_ai.usage.output_tokens"] == 3
    assert about["gen_ai.usage.input_tokens"] > 0
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert [event.name for event in sequence.events] == ["first token"]
    assert not any("secret" in str(span) for span in collector.spans)


async def test_samples_errors_and_refusals(toy_folder: Any) -> None:
    sampling = {"max_new_tokens": 2, "n": 2, "temperature": 1.0}
    with Collector() as collector:
        async with _server(toy_folder, collector) as made:
            await made.post("/generate", text="hi", sampling_params=sampling)
            refused = await made.post("/generate", text="hi", sampling_params={"top_p": 7})
            assert refused.status_code == 400
            made.state.extra(Tracer).close()
        good, bad = collector.wait_for("POST /generate", 2)
    assert [span.name for span in collector.below(good)] == ["generate_content tiny"] * 2
    assert collector.below(bad) == [] and good.trace_id != bad.trace_id
    assert values(bad.attributes)["http.response.status_code"] == 400
    assert (good.status.code, bad.status.code) == (0, 0)  # a client's fault is no error here


async def test_without_the_flag_nothing_watches(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}) as made:
        kinds = [type(one).__name__ for one in made.engine.intake.observers]
        assert Tracer not in made.state.extras and "TraceObserver" not in kinds
        assert "TraceMiddleware" not in str(made.app.user_middleware)
