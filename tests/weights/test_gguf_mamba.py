"""GGUF files of models with Mamba layers, with what llama.cpp's converters do to their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.weights.test_gguf_hybrid import _check
from tests.weights.test_gguf_names import convert


def _stored(name: str, value: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """As the converters of Mamba store it; Mamba 2 has numbers of heads as columns."""
    if name.endswith("A_log"):
        value = -value.exp()
    if name.endswith("conv1d.weight"):
        return value.squeeze(1)
    if name.endswith(("A_log", ".D")):
        return value if value.ndim > 1 or "n_groups" not in str(c) else value[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return value.view(c.get("n_groups") or c["mamba_n_groups"], -1)
    return value


def _folded(name: str, value: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """Multipliers of Falcon H1 in its weights."""
    ssm, mlp = c["ssm_multipliers"], c["mlp_multipliers"]
    size = c["mamba_n_groups"] * c["mamba_d_state"]
    rows = [c["mamba_d_ssm"]] * 2 + [size] * 2 + [c["mamba_n_heads"]]
    each = torch.cat([torch.full((n,), one) for n, one in zip(rows, ssm, strict=True)])
    factors: dict[str, Any] = {
        "q_proj": c["attention_in_multiplier"],
        "k_proj": c["attention_in_multiplier"] * c["key_multiplier"],
        "v_proj": c["attention_in_multiplier"], "o_proj": c["attention_out_multiplier"],
        "gate_proj": mlp[0], "down_proj": mlp[1], "out_proj": c["ssm_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"] * each[:, None], "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }  # fmt: skip
    part = name.split(".")[-2]
    return _stored(name, value * factors[part] if part in factors else value, c)


def _scan(c: dict[str, Any]) -> dict[str, Any]:
    inner = c.get("mamba_d_ssm") or c.get("intermediate_size")
    if c["model_type"] in ("mamba2", "jamba", "bamba"):
        inner = (c.get("expand") or c["mamba_expand"]) * c["hidden_size"]
    heads = next((c[k] for k in ("mamba_n_heads", "num_heads", "mamba_num_heads") if k in c), None)
    if c["model_type"] == "nemotron_h":
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    found = {
        "ssm.conv_kernel": c.get("conv_kernel") or c["mamba_d_conv"], "ssm.inner_size": inner,
        "ssm.state_size": next(
            c[k] for k in ("state_size", "ssm_state_size", "mamba_d_state") if k in c
        ),
        "ssm.time_step_rank": heads or c.get("mamba_dt_rank") or c["time_step_rank"],
        "ssm.group_count": c.get("n_groups") or c.get("mamba_n_groups"),
        "attention.layer_norm_rms_epsilon": c.get("layer_norm_epsilon") or c["rms_norm_eps"],
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def _kv_heads(c: dict[str, Any], attends: list[int]) -> dict[str, Any]:
    count = c["num_hidden_layers"]
    return {"attention.head_count_kv": [c["num_key_value_heads"] * (i in attends)
                                        for i in range(count)]}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "arch", "settings", "extra"),
    [
        ("MambaForCausalLM", "mamba", {}, {"ssm.dt_b_c_rms": False}),
        ("FalconMambaForCausalLM", "mamba", {}, {"ssm.dt_b_c_rms": True}),
        ("Mamba2ForCausalLM", "mamba2", {"n_groups": 2}, {}),
        ("JambaForCausalLM", "jamba", {}, {}),
        ("FalconH1ForCausalLM", "falcon-h1", {"tie_word_embeddings": False}, {}),
        ("BambaForCausalLM", "granitehybrid", {}, {"rope.dimension_count": 8}),
        (
            "NemotronHForCausalLM", "nemotron_h_moe", {},
            {"expert_count": 4, "expert_used_count": 2, "expert_weights_norm": True,
             "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 24},
        ),
    ],
)  # fmt: skip
def test_mamba(
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
    extra = {**extra, **_scan(c)}
    if arch == "jamba":
        extra |= _kv_heads(c, [1, 3]) | {"expert_count": c["num_experts"]}
    if arch == "granitehybrid":
        extra |= _kv_heads(c, c["attn_layer_indices"])
    alter = _folded if arch == "falcon-h1" else _stored
    file = convert(folder, tmp_path / "m.gguf", arch, extra, lambda n, v: alter(n, v, c))
    _check(file, folder)
