"""radixlm.Engine: what its calls do once it is shut down."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import radixlm
from radixlm.base.errors import EngineError
from radixlm.weights.size import stored_bytes

SHUT = "this engine was shut down: make a new radixlm.Engine"
LONG = {"max_new_tokens": 4000, "ignore_eos": True}


def weights(**options: object) -> float:
    with radixlm.Engine(**options) as engine:
        state = engine.get_server_info()
    assert state["internal_states"][0]["memory_usage"]["weight"] == round(
        state["weight_bytes"] / 2**30, 3
    )
    return float(state["weight_bytes"])


def test_calls_after_shutdown_say_so() -> None:
    engine = radixlm.Engine()
    engine.shutdown()
    engine.shutdown()
    calls = [
        lambda: engine.generate("hello"),
        lambda: list(engine.generate("hello", stream=True)),
        lambda: asyncio.run(engine.async_generate("hello")),
        lambda: engine.encode("hello"),
        lambda: asyncio.run(engine.async_encode("hello")),
        engine.flush_cache,
        engine.get_server_info,
        lambda: engine.get_weights_by_name("x"),
        lambda: engine.abort_request(abort_all=True),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=SHUT):
            call()


def test_shutdown_ends_the_calls_that_run() -> None:
    engine = radixlm.Engine(max_total_tokens=16_384)
    events = engine.generate("hello", LONG, stream=True)
    next(events)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate("other", LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while len(engine._engine.intake.requests) < 2:
        next(events)
    engine.shutdown()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(EngineError, match=SHUT):
        for _ in events:
            pass
    assert [str(failure) for failure in failures] == [SHUT]


def test_the_size_of_weights_is_that_of_the_packed_ones() -> None:
    plain, quantized = weights(), weights(quantization="w8a8_int8")
    assert weights(dtype="float32") > 1.9 * plain
    assert quantized < 0.6 * plain
    assert weights(torchao_config="int4wo-32") < 0.4 * plain


def test_shared_memory_counts_once() -> None:
    rows = torch.zeros(4, 8)
    assert stored_bytes({"a": rows, "b": [rows[:2], (rows.T,)]}) == 128
