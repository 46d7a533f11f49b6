"""Traces of an engine without a server."""

from __future__ import annotations

import pytest
from tests.fakes.otlp import Collector, values
from tests.fakes.tiny_checkpoint import cached_tiny

import radixlm

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")


def test_an_offline_engine_is_traced() -> None:
    with (
        Collector() as collector,
        radixlm.Engine(
            model_path=str(cached_tiny("LlamaForCausalLM")), cpu_threads=1, log_level="error",
            max_total_tokens=256, enable_trace=True, oltp_traces_endpoint=collector.endpoint,
            served_model_name="tiny", chunked_prefill_size=16,
        ) as engine,
    ):  # fmt: skip
        params = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
        engine.generate(input_ids=list(range(5, 35)), sampling_params=params)
        (sequence,) = collector.wait_for("generate_content tiny")
        parts = [span for span in collector.below(sequence) if span.name != "detokenize"]
    assert [part.name for part in parts] == ["tokenize", "queue", "prefill", "prefill", "decode"]
    tokens = [values(part.attributes).get("radixlm.tokens") for part in parts]
    assert tokens[2:] == [16, 14, 3]
    assert not sequence.parent_span_id and sequence.kind == 1
