"""Requests for a model that reasons."""

from __future__ import annotations

import msgspec
import pytest

from radixlm.entrypoints.reasoning import apply_reasoning
from radixlm.intake.records import GenerateRequest
from radixlm.wire.sampling_params import SamplingParams


@pytest.mark.parametrize("budget", [0, 2**64, 10**40])
def test_any_budget_fits_a_message(budget: int) -> None:
    """The bound goes to the engine in a message, which has no larger integers than 64 bits."""
    request = GenerateRequest(prompt="Why?", sampling=SamplingParams(), max_thinking_tokens=budget)
    apply_reasoning(request, "qwen3")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request.sampling.custom_params))
    assert sent["thinking_budget"] == min(budget, 2**63 - 1)
    assert (sent["start"], sent["end"]) == ("<think>", "</think>")
