"""GGUF files of models whose q, k and v are one matrix, or whose keys and values come from a latent
one, with what llama.cpp's converters do to their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes import gguf_file
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.weights.test_gguf_hybrid import _check
from tests.weights.test_gguf_names import convert

from radixlm.base.errors import CheckpointError
from radixlm.weights.gguf_file import GgufSource


def _ungrouped(value: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Rows by KV head [its q heads][k][v] -> [all q][all k][all v]."""
    each = heads // kv_heads
    grouped = value.view(kv_heads, each + 2, -1, *value.shape[1:])
    parts = (grouped[:, :each], grouped[:, each], grouped[:, each + 1])
    return torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])


def _as_stored(name: str, value: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    if "query_key_value" in name:
        heads = c.get("num_attention_heads") or c["n_head"]
        return _ungrouped(value, heads, c.get("num_kv_heads") or heads)
    if c["model_type"] == "gpt2" and value.ndim == 2 and ".h." in name:
        return value.T
    return value


@pytest.mark.parametrize(
    ("architecture", "arch", "settings", "extra"),
    [
        ("GPT2LMHeadModel", "gpt2", {}, {}),
        ("GPTBigCodeForCausalLM", "starcoder", {"multi_query": True}, {}),
        (
            "GPTNeoXForCausalLM", "gptneox", {},
            {"rope.dimension_count": 4, "use_parallel_residual": True},
        ),
        ("BloomForCausalLM", "bloom", {}, {"feed_forward_length": 192}),
        ("FalconForCausalLM", "falcon", {}, {"attention.head_count_kv": 2}),
        (
            "FalconForCausalLM", "falcon", {"num_ln_in_parallel_attn": 1},
            {"attention.head_count_kv": 2},
        ),
        (
            "FalconForCausalLM", "falcon",
            {"new_decoder_architecture": False, "num_kv_heads": 1, "multi_query": True,
             "parallel_attn": True, "num_ln_in_parallel_attn": None},
            {"attention.head_count_kv": 1},
        ),
    ],
)  # fmt: skip
def test_joined_projections(
    architecture: str,
    arch: str,
    settings: dict[str, Any],
    extra: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny(architecture, **settings)
    c = json.loads((folder / "config.json").read_text())
    extra = {"attention.layer_norm_epsilon": 1e-5, **extra}
    file = convert(folder, tmp_path / "m.gguf", arch, extra, lambda n, v: _as_stored(n, v, c))
    _check(file, folder)


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize(
    ("architecture", "arch"),
    [("DeepseekV2ForCausalLM", "deepseek2"), ("DeepseekV3ForCausalLM", "deepseek2"),
     ("MiniCPM3ForCausalLM", "minicpm3")],
)  # fmt: skip
def test_latent_attention(
    architecture: str,
    arch: str,
    is_apart: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Newer converters take K and V of kv_b_proj apart, and tell their sizes elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny(architecture)
    c = json.loads((folder / "config.json").read_text())
    apart: dict[str, Any] = {}
    if is_apart and arch != "minicpm3":
        for name, value in load_file(folder / "model.safetensors").items():
            if name.endswith("kv_b_proj.weight"):
                parts = value.view(c["num_attention_heads"], -1, c["kv_lora_rank"]).split(
                    (c["qk_nope_head_dim"], c["v_head_dim"]), 1
                )
                layer = name.split(".")[2]
                apart[f"blk.{layer}.attn_k_b.weight"] = parts[0].mT.contiguous(), "F32"
                apart[f"blk.{layer}.attn_v_b.weight"] = parts[1].contiguous(), "F32"
    mla = "_mla" if apart else ""
    extra = {
        "attention.kv_lora_rank": c["kv_lora_rank"], "attention.q_lora_rank": c["q_lora_rank"],
        f"attention.key_length{mla}": c["qk_head_dim"],
        f"attention.value_length{mla}": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"], "attention.head_count_kv": 1,
        "expert_count": c.get("n_routed_experts"), "expert_shared_count": c.get("n_shared_experts"),
        "expert_group_count": c.get("n_group"), "expert_group_used_count": c.get("topk_group"),
        "expert_weights_scale": c.get("routed_scaling_factor"),
    }  # fmt: skip
    file = convert(folder, tmp_path / "m.gguf", arch, extra, tables=apart)
    _check(file, folder)


def test_a_part_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = {
        "general.architecture": "deepseek2", "deepseek2.block_count": 1,
        "deepseek2.embedding_length": 8, "deepseek2.attention.head_count": 1,
    }  # fmt: skip
    tensors = {"blk.0.attn_k_b.weight": (torch.ones(1, 4, 2), "F32")}
    source = GgufSource(gguf_file.write(tmp_path / "m.gguf", said, tensors))
    with pytest.raises(CheckpointError, match=r"m\.gguf: blk\.0\.attn_v_b\.weight is missing"):
        source.read("model.layers.0.self_attn.kv_b_proj.weight")
