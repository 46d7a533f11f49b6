"""Steps that decode several tokens in turn (--num-continuous-decode-steps) give the tokens of steps
that decode one, for families of all kinds of attention and every way to sample."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.entrypoints.offline import Engine
from radixlm.kernels import cpu
from radixlm.models.program.step import StepProgram

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 30},
    {"temperature": 1.0, "sampling_seed": 1, "max_new_tokens": 27, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.8, "sampling_seed": 2, "max_new_tokens": 31},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.05, "sampling_seed": 3, "max_new_tokens": 11},
    {"temperature": 1.1, "sampling_seed": 4, "max_new_tokens": 40, "stop_token_ids": [*range(90)]},
    {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 1},
    {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "sampling_seed": 6, "frequency_penalty": 0.7, "max_new_tokens": 19},
    {"temperature": 0, "logit_bias": {"7": 3.0}, "min_new_tokens": 5, "max_new_tokens": 18},
]
# whether the program can go on by itself
FAMILIES = {
    "Qwen3ForCausalLM": True,
    "Gemma3ForCausalLM": True,
    "GptOssForCausalLM": True,
    "DeepseekV3ForCausalLM": True,
    "Qwen3MoeForCausalLM": True,
    "MambaForCausalLM": False,
}


def answers(arch: str, passes: int, params: list[dict[str, Any]], **options: Any) -> list[Any]:
    prompts = [[3 + (7 * i + 5 * j) % 80 for j in range(1 + 9 * i)] for i in range(len(params))]
    with Engine(
        model_path=str(cached_tiny(arch)), cpu_threads=1, max_total_tokens=2048, page_size=16,
        skip_tokenizer_init=True, num_continuous_decode_steps=passes, **options,
    ) as engine:  # fmt: skip
        together = engine.generate(input_ids=prompts, sampling_params=params)
        alone = [
            engine.generate(input_ids=prompt, sampling_params=param)
            for prompt, param in list(zip(prompts, params, strict=True))[2:4]
        ]
    found = [*together, *alone]
    return [(one["output_ids"], one["meta_info"]["finish_reason"]) for one in found]


@pytest.fixture
def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens in turn of each step that had more than one."""
    found: list[int] = []
    go_on = StepProgram.go_on

    def spy(self: StepProgram, batch: Any, logits_RV: Any, how: Any) -> Any:
        result = go_on(self, batch, logits_RV, how)
        if result is not None:
            found.append(len(result[0]))
        return result

    monkeypatch.setattr(StepProgram, "go_on", spy)
    return found


@pytest.mark.parametrize("arch", FAMILIES)
def test_families(arch: str, _counted: list[int]) -> None:
    expected = answers(arch, 1, PLAIN)
    assert not _counted
    assert answers(arch, 5, PLAIN) == expected
    assert (5 in _counted) == FAMILIES[arch]


def test_sampling_that_needs_the_host(_counted: list[int]) -> None:
    """Rows with penalties or biases take one token a step, and so do those beside them."""
    params = [*OTHERS, *PLAIN]
    assert answers("Qwen3ForCausalLM", 4, params) == answers("Qwen3ForCausalLM", 1, params)
    assert _counted  # when the others have ended


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8_e5m2"])
def test_small_caches(dtype: str, _counted: list[int]) -> None:
    options = {"kv_cache_dtype": dtype, "dtype": "bfloat16"}
    expected = answers("Qwen3ForCausalLM", 1, PLAIN, **options)
    assert answers("Qwen3ForCausalLM", 7, PLAIN, **options) == expected
    assert 7 in _counted


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "size"],
}
GRAMMARS: list[dict[str, Any]] = [
    {"temperature": 0, "json_schema": json.dumps(SCHEMA), "max_new_tokens": 25},
    {"temperature": 1.2, "sampling_seed": 1, "json_schema": json.dumps(SCHEMA)},
    {"temperature": 1.5, "sampling_seed": 2, "regex": "(ab|ba|c)*d", "max_new_tokens": 33},
    {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True},
    {"temperature": 1.0, "sampling_seed": 4, "ebnf": 'root ::= "yes, " [0-9]+ | "no"'},
]


@pytest.mark.parametrize("jumps", [True, False])
def test_grammars(jumps: bool, _counted: list[int]) -> None:
    """The masks of the tokens in turn follow those that were sampled before them."""

    def texts(passes: int) -> list[Any]:
        with Engine(
            num_continuous_decode_steps=passes, disable_jump_forward=not jumps,
            cpu_threads=1, max_total_tokens=2048, random_seed=1,
        ) as engine:  # fmt: skip
            params = [{"max_new_tokens": 50, **one} for one in GRAMMARS]
            found = engine.generate(["Tell of it:"] * len(params), params)
            found.append(engine.generate("And?", params[1]))
        return [(one["output_ids"], one["meta_info"]["finish_reason"]) for one in found]

    expected = texts(1)
    assert not _counted
    assert texts(6) == expected
    assert _counted.count(6) > 5


def test_no_passes_behind_the_end(_counted: list[int]) -> None:
    """Where all sequences have ended, the step does."""
    chat = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    with Engine(num_continuous_decode_steps=30, cpu_threads=1, max_total_tokens=512) as engine:
        found = engine.generate(chat, {"temperature": 0, "max_new_tokens": 100})
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    assert sum(_counted) == found["meta_info"]["completion_tokens"] - 1  # of the prompt's step
    assert _counted[-1] < 30
