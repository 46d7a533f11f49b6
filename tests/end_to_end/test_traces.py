"""The trace of one stream, through the gateway, whose engine is killed in its midst."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.otlp import Collector, values
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.router.processes import gateway_process

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
TRACE = "0af7651916cd43dd8448eb211c80319c"
NUM_TOKENS = 30


def _stream(url: str, server: RunningServer) -> None:
    """Take a stream whose engine is killed after five events."""
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    body = {"input_ids": list(range(5, 45)), "sampling_params": sampling, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    num_events, last = 0, ""
    with httpx.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=120) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                num_events, last = num_events + 1, line
            if num_events == 5:
                num_events += 1
                server.engine().kill()
    assert json.loads(last[6:])["meta_info"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.timeout(180)
def test_both_engines_are_under_one_trace() -> None:
    with Collector() as collector:
        flags = ("--enable-trace", "--otlp-traces-endpoint", collector.endpoint)
        options = ("--skip-tokenizer-init", "--disable-ui", "--chunked-prefill-size", "16")
        with RunningServer(*flags, *options, model=str(cached_tiny("Qwen3ForCausalLM"))) as server:
            gateway = gateway_process("--worker-urls", server.url, *flags)
            try:
                server.post("/slow_down", forward_sleep_time=0.05)
                before = server.engine().pid
                _stream(gateway.url, server)
                after = server.engine().pid
                hop, call = _by_parent(collector.wait_for("POST /generate", 3))
            finally:
                gateway.kill()
        (sequence,) = [span for span in collector.below(call) if "Qwen3" in span.name]
    parts = [span for span in collector.below(sequence) if span.name != "detokenize"]
    assert {span.trace_id.hex() for span in (hop, call, sequence, *parts)} == {TRACE}
    names = [span.name for span in parts]
    # 40 tokens in chunks of 16, then those and the emitted ones again
    first, again = names[: names.index("engine_dead")], names[names.index("engine_dead") + 1 :]
    assert first == ["tokenize", "queue", "prefill", "prefill", "prefill", "decode"]
    assert again[-1] == "decode" and set(again[:-1]) == {"prefill"} and len(again) >= 3
    dead = parts[len(first)]
    assert dead.status.code == 2
    assert parts[len(first) + 1].links[0].span_id == dead.span_id
    pids = [values(span.attributes).get("radixlm.engine.pid") for span in parts]
    assert pids[2] == pids[5] == before and pids[-1] == after and before != after
    about = values(sequence.attributes)
    assert about["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert sum(values(s.attributes)["radixlm.tokens"] for s in parts if s.name == "decode") == 30
    assert values(hop.attributes)["server.address"] == server.url


def _by_parent(spans: list[Any]) -> tuple[Any, Any]:
    """The gateway's try, and the call at the worker below it."""
    spans = [span for span in spans if span.trace_id.hex() == TRACE]
    (front,) = [span for span in spans if span.parent_span_id.hex() == "b7ad6b7169203331"]
    (hop,) = [span for span in spans if span.parent_span_id == front.span_id]
    (call,) = [span for span in spans if span.parent_span_id == hop.span_id]
    return hop, call
