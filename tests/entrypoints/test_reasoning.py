"""Requests for a model that reasons."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from radixlm.entrypoints.reasoning import apply_reasoning, make_strict
from radixlm.intake.records import GenerateRequest
from radixlm.wire.requests import GrammarSpec
from radixlm.wire.sampling_params import SamplingParams


@pytest.mark.parametrize("budget", [0, 2**64, 10**40])
def test_any_budget_fits_a_message(budget: int) -> None:
    """The bound goes to the engine in a message, which has no larger integers than 64 bits."""
    request = GenerateRequest(prompt="Why?", sampling=SamplingParams(), max_thinking_tokens=budget)
    apply_reasoning(request, "qwen3")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request.sampling.custom_params))
    assert sent["thinking_budget"] == min(budget, 2**63 - 1)
    assert (sent["start"], sent["end"]) == ("<think>", "</think>")


@pytest.mark.parametrize("name", ["SGLANG_MAX_THINK_TOKENS", "RADIXLM_MAX_THINK_TOKENS"])
def test_the_limit_of_the_server_is_of_requests_without_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def budget(parser: str | None = "qwen3", params: Any = None, **fields: Any) -> Any:
        sampling = SamplingParams(custom_params=params)
        request = GenerateRequest(prompt="Why?", sampling=sampling, **fields)
        apply_reasoning(request, parser)
        assert (request.processor is None) == (request.sampling.custom_params is None)
        return (request.sampling.custom_params or {}).get("thinking_budget")

    assert budget() is None
    for limit in (0, 40):
        monkeypatch.setenv(name, str(limit))
        assert budget() == limit and budget(parser=None) is None
        assert budget(max_thinking_tokens=99) == 99
        assert budget(params={"thinking_budget": 7}) == 7
    monkeypatch.setenv(name, "-1")
    assert budget() is None


def test_another_processor_goes_before_the_limit_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_MAX_THINK_TOKENS", "4")
    request = GenerateRequest(prompt="Why?", sampling=SamplingParams(), processor="mine")
    apply_reasoning(request, "qwen3")
    assert request.processor == "mine" and request.sampling.custom_params is None
    assert request.reasoning_bound is None


def test_strict_reasoning_beside_another_processor() -> None:
    request = GenerateRequest(prompt="Why?", sampling=SamplingParams(), processor="mine")
    request.max_thinking_tokens = 3
    apply_reasoning(request, "qwen3")
    make_strict(request, "qwen3")
    assert request.processor == "mine" and request.reasoning_bound == {
        "start": "<think>", "end": "</think>", "thinking_budget": 3, "excluded": ["<tool_call>"],
    }  # fmt: skip


def test_a_bound_beside_another_processor() -> None:
    mine = SamplingParams(custom_params={"end": 7})
    request = GenerateRequest(prompt="Why?", sampling=mine, processor="mine", max_thinking_tokens=3)
    apply_reasoning(request, "qwen3")
    assert request.processor == "mine" and request.sampling.custom_params == {"end": 7}
    bound = {"start": "<think>", "end": "</think>", "thinking_budget": 3}
    assert request.reasoning_bound == bound


@pytest.mark.parametrize("bound", [None, 5])
def test_strict_reasoning_holds_no_tool_calls(bound: int | None) -> None:
    def params(parser: str | None, grammar: GrammarSpec | None = None, **fields: Any) -> Any:
        sampling = SamplingParams()
        request = GenerateRequest(prompt="Why?", sampling=sampling, grammar=grammar, **fields)
        request.max_thinking_tokens = bound if not fields and parser else None
        apply_reasoning(request, parser)
        make_strict(request, parser)
        return request.sampling.custom_params or {}

    assert params("qwen3")["excluded"] == ["<tool_call>"]
    assert params("qwen3").get("thinking_budget") == bound
    assert params("qwen3", GrammarSpec("regex", "a", after="</think>"))["excluded"]
    # else nothing would be allowed once the grammar has ended
    assert "excluded" not in params("qwen3", GrammarSpec("regex", "a"))
    assert not params("qwen3", processor="mine") and not params(None)
    # gpt-oss calls tools before its reasoning has ended
    assert "excluded" not in params("gpt-oss")
