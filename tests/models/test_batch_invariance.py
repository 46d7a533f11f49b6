"""Greedy tokens and their log-probabilities, alone and among 63 others, are equal bit for bit, for
every kind of weights and cache and on every instruction set of this processor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.entrypoints.offline import Engine
from radixlm.kernels import cpu
from radixlm.kernels.cpu.extension import native

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

ISAS = native().supported_isas() if cpu.available else []
BEST = ISAS[:1]
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "int8wo": {"quantization": "int8wo"},
    "w8a8": {"quantization": "w8a8_int8"},
    "int4": {"quantization": "int4wo-32"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
}
EVERYWHERE = ("bf16", "w8a8", "int4")
CASES = [pytest.param(kind, isa) for kind in KINDS for isa in BEST] + [
    pytest.param(kind, isa, marks=pytest.mark.slow) for kind in EVERYWHERE for isa in ISAS[1:]
]
NUM_REQUESTS, NUM_NEW, ALONE = 64, 6, (0, 17, 63)


@pytest.fixture
def _select(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native().isa()
    native().select_isa(request.param)
    yield
    native().select_isa(before)


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each prompt, all in one batch."""
    params = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    replies = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    return [
        (reply["output_ids"], [row[0] for row in reply["meta_info"]["output_token_logprobs"]])
        for reply in replies
    ]


def check(arch: str, **kind: Any) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 250) for _ in range(draw.randrange(1, 60))] for _ in range(64)]
    with Engine(
        model_path=str(cached_tiny(arch)), cpu_threads=2, disable_radix_cache=True,
        max_running_requests=NUM_REQUESTS, max_total_tokens=8192, skip_tokenizer_init=True, **kind,
    ) as engine:  # fmt: skip
        together = answers(engine, prompts)
        assert len({tuple(tokens) for tokens, _ in together}) > NUM_REQUESTS // 4
        for i in ALONE:
            assert answers(engine, [prompts[i]]) == [together[i]], i


@pytest.mark.parametrize(("kind", "_select"), CASES, indirect=["_select"])
@pytest.mark.usefixtures("_select")
def test_alone_and_in_a_batch_of_64(kind: str) -> None:
    check("Qwen3ForCausalLM", **KINDS[kind])


@pytest.mark.parametrize("kind", ["bf16", "w8a8", "int4"])
def test_experts_alone_and_in_a_batch_of_64(kind: str) -> None:
    check("Qwen3MoeForCausalLM", **KINDS[kind])


@pytest.mark.parametrize("kind", ["bf16", "w8a8", "int8 cache"])
def test_latents_alone_and_in_a_batch_of_64(kind: str) -> None:
    check("DeepseekV2ForCausalLM", **KINDS[kind])
