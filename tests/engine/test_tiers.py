"""Whole engines with tiers: answers are those of the engine without, in tokens, log-probabilities
and hidden states, also when the KV of a prompt comes from the tier of an engine before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import radixlm
from radixlm.engine.features.arrival_rules import ArrivalOptions
from tests.engine.drafted_engine import drafted_engine
from tests.fakes import tiers as fakes
from tests.fakes.tiers import DictTier
from tests.fakes.tiny_checkpoint import cached_tiny

SYSTEM = "You answer in one word, as a careful clerk would, and you never say more than that. "
TEXTS = [SYSTEM + text for text in ("Where is Rome?", "12 + 30 =", "Who wrote the letter?")]
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "string"}}}'


@contextmanager
def tiered_engine(tiers: list[DictTier], **options: Any) -> Iterator[radixlm.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixlm.engine.tiers.SOURCES", ["tests.fakes.tiers:shared_tiers"])
        patch.setattr(fakes, "SHARED", tiers)
        waits = partial(ArrivalOptions, policy="wait_complete")
        patch.setattr("radixlm.engine.tiers.ArrivalOptions", waits)
        with drafted_engine(None, **options) as engine:
            yield engine


def ask(engine: radixlm.Engine, **more: Any) -> list[Any]:
    """Greedy and seeded, with log-probabilities, n of 2, a grammar."""
    params = [
        {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True},
        {"max_new_tokens": 9, "temperature": 0.8, "sampling_seed": 3},
        {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 5, "json_schema": SCHEMA},
    ]
    some = engine.generate(TEXTS, params, return_logprob=True, top_logprobs_num=2, **more)
    two = {"n": 2, "max_new_tokens": 7, "temperature": 1.0, "sampling_seed": 6}
    return [*some, *engine.generate(TEXTS[0], two, **more)]


def facts(answer: Any) -> Any:
    meta = answer["meta_info"]
    names = ("finish_reason", "output_token_logprobs", "output_top_logprobs")
    return answer["text"], answer["output_ids"], [meta.get(name) for name in names]


def hits(answers: list[Any]) -> int:
    return sum(one["meta_info"]["cached_tokens_details"]["host"] for one in answers)


def compare(
    tiers: list[DictTier], min_hits: int, make: Any = tiered_engine, **options: Any
) -> None:
    """The plain engine's answers; then those of two engines with the same tiers, in turn."""
    more = options.pop("ask", {})
    with drafted_engine(None, **options) as engine:
        plain = list(map(facts, ask(engine, **more)))
    with make(tiers, **options) as engine:
        assert list(map(facts, ask(engine, **more))) == plain
        assert engine.flush_cache()
        again = ask(engine, **more)
        assert list(map(facts, again)) == plain
        assert hits(again) >= min_hits
        details = again[0]["meta_info"]["cached_tokens_details"]
        assert sum(details.values()) == again[0]["meta_info"]["cached_tokens"]
    with make(tiers, **options) as engine:  # another one, later
        again = ask(engine, **more)
        assert list(map(facts, again)) == plain
        assert hits(again) >= min_hits


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3ForCausalLM", {"page_size": 16}),
        ("Qwen3ForCausalLM", {"page_size": 16, "kv_cache_dtype": "int8"}),
        ("Gemma3ForCausalLM", {"page_size": 16}),
        ("Gemma3ForCausalLM", {"page_size": 16, "chunked_prefill_size": 32}),
        ("DeepseekV3ForCausalLM", {"page_size": 16}),
        ("Qwen3NextForCausalLM", {"page_size": 16, "chunked_prefill_size": 64}),
        ("FalconH1ForCausalLM", {"page_size": 16}),
    ],
    ids=str,
)
def test_architectures(architecture: str, options: dict[str, Any]) -> None:
    compare([DictTier()], 64, model_path=str(cached_tiny(architecture)), **options)
