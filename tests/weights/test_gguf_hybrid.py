"""GGUF files of models that keep states, with what llama.cpp's converters do to their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
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
