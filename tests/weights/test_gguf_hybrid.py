"""GGUF files of models that keep states, with what llama.cpp's converters do to their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes import gguf_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.weights.test_gguf_names import IDS, convert

from radixlm.engine.gguf import unpacked

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
MIXED = ["linear_attention", "full_attention", "linear_attention"]


def _tiled(value: torch.Tensor, first: int, groups: int, heads: int) -> torch.Tensor:
    """Value heads in the order head 0 of each group, head 1 of each group ..."""
    parts = list(value[first:].chunk(heads))
    order = [
        group * (heads // groups) + i for i in range(heads // groups) for group in range(groups)
    ]
    return torch.cat([value[:first], *(parts[i] for i in order)])


def _altered(name: str, value: torch.Tensor, c: dict[str, Any], tiles: bool) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return value if "linear_attn" in name else value + 1
    if name.endswith("A_log"):
        value = -value.exp()
    if "conv1d" in name:
        value = value.squeeze(1)
    if not tiles or "linear_attn" not in name:
        return value
    groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if "out_proj" in name:
        return _tiled(value.T, 0, groups, heads).T
    joined = "conv1d" in name or "in_proj_qkv" in name
    return _tiled(value, joined * 2 * groups * c["linear_key_head_dim"], groups, heads)


def _delta(c: dict[str, Any]) -> dict[str, Any]:
    found = {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
        "rope.dimension_count": c["head_dim"] // 2,
    }  # fmt: skip
    if "num_experts" in c:
        found["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    return found


@pytest.mark.parametrize(
    ("architecture", "arch"),
    [("Qwen3_5ForCausalLM", "qwen35"), ("Qwen3_5MoeForCausalLM", "qwen35moe")],
)
def test_delta_nets(
    architecture: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {**HEADS, "layer_types": MIXED, "num_hidden_layers": 3, "rope_parameters": ROPE}
    folder = cached_tiny(architecture, **settings)
    c = json.loads((folder / "config.json").read_text())
    file = convert(
        folder, tmp_path / "m.gguf", arch, _delta(c), lambda name, v: _altered(name, v, c, True)
    )
    _check(file, folder)


def test_short_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny("Lfm2MoeForCausalLM", use_expert_bias=True, norm_topk_prob=True)
    c = json.loads((folder / "config.json").read_text())
    kv = [c["num_key_value_heads"] * (kind == "full_attention") for kind in c["layer_types"]]
    extra = {
        "attention.head_count_kv": kv, "shortconv.l_cache": c["conv_L_cache"],
        "leading_dense_block_count": c["num_dense_layers"],
        "attention.layer_norm_rms_epsilon": c["norm_eps"],
    }  # fmt: skip
    _check(convert(folder, tmp_path / "m.gguf", "lfm2moe", extra, _squeezed), folder)


def _squeezed(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.squeeze(1) if "conv.conv" in name else value


def _check(file: Path, folder: Path) -> None:
    got, wanted = (
        PagedRunner(load_model(one)).prefill({0: IDS}, num_chunks=2)[0]
        for one in (unpacked(file), folder)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_granite_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter takes gates and up-projections apart, and stores rows of q and k in pairs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny("GraniteMoeSharedForCausalLM")
    c = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Any] = {}
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "shared_mlp.output_linear": "ffn_down_shexp",
        "block_sparse_moe.output_linear": "ffn_down_exps", "self_attn.o_proj": "attn_output",
        "self_attn.v_proj": "attn_v", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    }  # fmt: skip
    for name, value in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in ends:
            tensors[f"{ends[stem]}.weight"] = value, "F32"
            continue
        _, _, layer, part = stem.split(".", 3)
        if part.endswith("input_linear"):
            own = "shexp" if "shared" in part else "exps"
            halves = value.chunk(2, -2)
            for half, kind in zip(halves, ("gate", "up"), strict=True):
                tensors[f"blk.{layer}.ffn_{kind}_{own}.weight"] = half.contiguous(), "F32"
            continue
        if part.endswith(("q_proj", "k_proj")):
            heads = c["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            pairs = value.view(heads, 2, -1, value.shape[1]).transpose(1, 2)
            value = pairs.reshape(value.shape)
        tensors[f"blk.{layer}.{names[part]}.weight"] = value, "F32"
    said = gguf_file.metadata(c, "granitemoe")
    said["granitemoe.expert_shared_feed_forward_length"] = c["shared_intermediate_size"]
    _check(gguf_file.write(tmp_path / "m.gguf", said, tensors), folder)
