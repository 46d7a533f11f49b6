"""--kv-cache-dtype: tokens do not depend on how they were computed, are near those of a
full-precision cache, and pages have the size that the memory budget assumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radixlm
from tests.fakes.tiny_checkpoint import cached_tiny

GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
# bytes of a token in the cache: K and V of 3 layers with 2 heads of 24 channels
NBYTES = {
    "fp8_e4m3": 288,
    "fp8_e5m2": 288,
    "int8": 336,
    "int4": 216,
    "bf16": 576,
    "fp16": 576,
    "float32": 1152,
}
# max change of a log-probability; the mantissas have 3, 2, 7, 7 and 10 bits
MOVES = {
    "fp8_e4m3": 0.2,
    "fp8_e5m2": 0.4,
    "int8": 0.05,
    "int4": 1.0,
    "bf16": 0.02,
    "fp16": 2e-3,
    "float32": 0,
}


def _answers(folder: object, kv_dtype: str, prompt: list[int], **options: object) -> Any:
    engine = radixlm.Engine(
        model_path=str(folder), kv_cache_dtype=kv_dtype, cpu_threads=1, random_seed=1,
        log_level="error", max_total_tokens=4096, **options,
    )  # fmt: skip
    others = [[i + 3] * (9 + i) for i in range(5)]
    with engine:
        first = engine.generate(
            input_ids=prompt, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
        )
        again = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        batch = engine.generate(input_ids=[prompt, *others], sampling_params=GREEDY)
    assert again["output_ids"] == first["output_ids"] == batch[0]["output_ids"]
    return first


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "backend"),
    [
        *(("Qwen3ForCausalLM", kv_dtype, "cpu") for kv_dtype in NBYTES),
        ("Qwen3ForCausalLM", "int8", "torch_native"),
        ("Qwen3ForCausalLM", "int4", "torch_native"),
        ("Qwen3ForCausalLM", "fp8_e5m2", "torch_native"),
        ("DeepseekV2ForCausalLM", "int8", "cpu"),
        ("DeepseekV2ForCausalLM", "int4", "cpu"),
        ("DeepseekV2ForCausalLM", "fp8_e4m3", "torch_native"),
    ],
)
def test_tokens_do_not_depend_on_how_they_were_computed(
    arch: str, kv_dtype: str, backend: str
) -> None:
    folder = cached_tiny(arch)
    prompt = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"attention_backend": backend}
    whole = _answers(folder, kv_dtype, prompt, chunked_prefill_size=2048, **options)
    cut = _answers(folder, kv_dtype, prompt, chunked_prefill_size=16, **options)
    assert cut["output_ids"] == whole["output_ids"]
    exact = _answers(folder, "float32", prompt, **options)
    pairs = zip(
        whole["meta_info"]["input_token_logprobs"][1:],
        exact["meta_info"]["input_token_logprobs"][1:],
        strict=True,
    )
    moved = max(abs(a[0] - b[0]) for a, b in pairs)
    assert moved <= MOVES[kv_dtype]
    assert kv_dtype == "float32" or moved > 0  # the flag is not ignored


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8_e4m3", "fp16"])
def test_pages_have_the_size_of_the_memory_budget(
    kv_dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixlm.engine import kept

    made: list[kept.Pools] = []
    make = kept.make_pools
    monkeypatch.setattr(kept, "make_pools", lambda *a: made.append(make(*a)) or made[0])
    folder = cached_tiny("Qwen3ForCausalLM")
    _answers(folder, kv_dtype, [5, 6, 7], attention_backend=backend)
    assert made[0].num_bytes == made[0].num_tokens * NBYTES[kv_dtype]
