"""Whole engines with the Triton backend in the interpreter: greedy tokens equal torch_native's,
with chunked prompts, a batch of two and a cached prefix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.tiny_checkpoint import cached_tiny

import radixlm

pytest.importorskip("triton")

GREEDY = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}


def answers(folder: object, backend: str, cached: int = 20, **options: Any) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 250, (n,), generator=g).tolist() for n in (21, 9)]
    engine = radixlm.Engine(
        model_path=str(folder), attention_backend=backend, device="cpu", cpu_threads=1,
        random_seed=1, log_level="error", max_total_tokens=512, chunked_prefill_size=16,
        **{"page_size": 4, **options},
    )  # fmt: skip
    with engine:
        both = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        again = engine.generate(input_ids=[*prompts[0], 7], sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] == cached
    return [answer["output_ids"] for answer in (*both, again)]


# these models have a window and a softcap, sinks, and latents
@pytest.mark.parametrize(
    "arch", ["Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_the_same_tokens_as_torch_native(arch: str) -> None:
    folder = cached_tiny(arch, num_hidden_layers=2)
    assert answers(folder, "triton") == answers(folder, "torch_native")


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_a_hit_inside_of_a_page_is_copied(dtype: str) -> None:
    folder = cached_tiny("Gemma2ForCausalLM", num_hidden_layers=2)
    options = {"page_size": 16, "cached": 21, "kv_cache_dtype": dtype}
    assert answers(folder, "triton", **options) == answers(folder, "torch_native", **options)


def test_the_same_tokens_with_all_kernels() -> None:
    """Norms of q and k, rotation and store are one launch before attention."""
    folder = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    expected = answers(folder, "torch_native")
    assert answers(folder, "triton", kernel=["all=triton"]) == expected


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_deterministic_inference(arch: str) -> None:
    """Log-probabilities, bit for bit: two prompts in chunks together, and each alone and whole."""
    folder = cached_tiny(arch, num_hidden_layers=2)
    prompts = [list(range(3, 24)), [7, 50, 9, 41, 11]]

    def logprobs(batches: list[list[list[int]]], chunk: int) -> list[Any]:
        engine = radixlm.Engine(
            model_path=str(folder), attention_backend="triton", device="cpu", cpu_threads=1,
            kernel=["all=triton"], enable_deterministic_inference=True, log_level="error",
            max_total_tokens=512, chunked_prefill_size=chunk,
        )  # fmt: skip
        with engine:
            made = [
                one
                for batch in batches
                for one in engine.generate(
                    input_ids=batch, sampling_params=GREEDY, return_logprob=True
                )
            ]
        return [one["meta_info"]["output_token_logprobs"] for one in made]

    assert logprobs([prompts], 16) == logprobs([prompts[:1], prompts[1:]], 64)


def test_double_sparsity(tmp_path: Path) -> None:
    """Answers beyond 12 tokens attend to 8 of them."""
    lists = [list(range(16))] * 2
    names = [f"model.layers.{layer}.self_attn.qk_proj" for layer in range(2)]
    (tmp_path / "channels.json").write_text(json.dumps(dict.fromkeys(names, lists)))
    options = {
        "enable_double_sparsity": True,
        "ds_channel_config_path": str(tmp_path / "channels.json"),
        "ds_heavy_channel_num": 4,
        "ds_heavy_token_num": 8,
        "ds_sparse_decode_threshold": 12,
    }
    folder = cached_tiny("Qwen3ForCausalLM", num_hidden_layers=2)
    expected = answers(folder, "torch_native", **options)
    assert answers(folder, "triton", **options) == expected
    assert answers(folder, "torch_native") != expected


def test_prompts_by_one_backend_and_decodes_by_another() -> None:
    folder = cached_tiny("DeepseekV2ForCausalLM", num_hidden_layers=2)
    expected = answers(folder, "torch_native")
    assert answers(folder, "torch_native", decode_attention_backend="triton") == expected
    assert answers(folder, "triton", decode_attention_backend="torch_native") == expected
