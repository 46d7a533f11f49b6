"""Families without a class in transformers, against a Hugging Face model of the same mathematics
whose tensors are renamed and fused as in those checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from radixlm.arch.hf import describe
from radixlm.arch.recipes import NormalizeRows
from tests.arch import oracle
from tests.fakes.shapes import LATENT, ROUTED

Rename = list[tuple[str, str]]
Fuse = dict[str, tuple[str, ...]]
SHAPE = {key: oracle.TINY[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
DEEP = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LONG = {"max_position_embeddings": 64}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass
class Case:
    """`oracle` with `changes` equals the architecture with `config`. `fuse` joins tensors (new part
    of a name <- old parts) before `rename` applies its substitutions."""

    oracle: str
    config: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    rename: Rename = field(default_factory=list)
    fuse: Fuse = field(default_factory=dict)
    join: Callable[[list[Tensor]], Tensor] = torch.cat
    experts: bool = False  # DeepSeek V2's experts instead of the oracle's MLP


def grouped(parts: list[Tensor]) -> Tensor:
    """q, k, v -> rows grouped by 2 KV heads of 16 channels: [its q heads][k][v]."""
    split = [part.unflatten(0, (2, -1)) for part in parts]
    return torch.cat(split, 1).flatten(0, 1)


LLAMA = {**SHAPE, **DEEP, **LONG}
H = [(r"model\.layers", "transformer.h"), (r"model\.norm", "transformer.ln_f")]
H += [("model.embed_tokens", "transformer.wte"), ("input_layernorm", "ln_1")]
H += [("post_attention_layernorm", "ln_2")]
BAILING = [("model.embed_tokens", "model.word_embeddings"), ("self_attn.o_proj", "attention.dense")]
ROUTED_EXPERTS = {"n_shared_experts": 2, "n_routed_experts": 8, "first_k_dense_replace": 1}

CASES: dict[str, Case] = {
    "XverseForCausalLM": Case("LlamaForCausalLM", {**LLAMA, "rms_norm_eps": 1e-6}),
    "OrionForCausalLM": Case(
        "StableLmForCausalLM", LLAMA, {"qk_layernorm": False, "partial_rotary_factor": 1.0}
    ),
    "MiMoForCausalLM": Case("Qwen2ForCausalLM", LLAMA),
    "AquilaForCausalLM": Case("LlamaForCausalLM", {**LLAMA, "rms_norm_eps": 1e-6}),
    "PanguEmbeddedForCausalLM": Case(
        "LlamaForCausalLM", {**LLAMA, "bias": True, "rms_norm_eps": 1e-6}, {"attention_bias": True}
    ),
    "PanguUltraMoEForCausalLM": Case(
        "DeepseekV3ForCausalLM",
        {**LLAMA, **LATENT, **ROUTED, "norm_topk_prob": True, "router_enable_expert_bias": True}
        | {"routed_scaling_factor": 2.5},
        {"n_group": 1, "topk_group": 1},
    ),
    "StableLMEpochForCausalLM": Case(
        "StableLmForCausalLM",
        {**LLAMA, "norm_eps": 1e-5, "rope_pct": 0.5},
        {"qk_layernorm": False, "partial_rotary_factor": 0.5},
    ),
    "RWForCausalLM": Case(
        "FalconForCausalLM",
        {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128}
        | {"multi_query": True, "bias": False, "alibi": False, "parallel_attn": True},
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    ),
    "InternLMForCausalLM": Case("LlamaForCausalLM", LLAMA, {"attention_bias": True}),
    "InternLM3ForCausalLM": Case(
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": 16, "qkv_bias": True, "bias": True, "rms_norm_eps": 1e-6},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "InternLM2ForCausalLM": Case(
        "LlamaForCausalLM",
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}},
        [
            ("model.embed_tokens", "model.tok_embeddings"),
            ("lm_head", "output"),
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ],
        {"attention.wqkv": QKV},
        grouped,
    ),
    "MiniCPMForCausalLM": Case(
        "GraniteForCausalLM",
        {**LLAMA, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
        | {"tie_word_embeddings": False},
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
        },
    ),
    "BaichuanForCausalLM": Case(
        "LlamaForCausalLM",
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
        {"num_key_value_heads": 4},
        fuse={"self_attn.W_pack": QKV},
    ),
    "ExaoneForCausalLM": Case(
        "LlamaForCausalLM",
        {
            **SHAPE,
            **LONG,
            "num_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_norm_epsilon": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": oracle.TINY_CONFIGS["LlamaForCausalLM"]["rope_parameters"],
        },
        rename=[
            *H,
            (r"self_attn\.o_proj", "attn.attention.out_proj"),
            (r"self_attn\.", "attn.attention."),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ],
    ),
    "QWenLMHeadModel": Case(
        "Qwen2ForCausalLM",
        {
            **SHAPE,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "kv_channels": 16,
            "seq_length": 64,
            "layer_norm_epsilon": 1e-6,
            "no_bias": True,
            "rotary_emb_base": 10000,
        },
        {"num_key_value_heads": 4},
        [
            *H,
            (r"self_attn\.o_proj", "attn.c_proj"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ],
        {"attn.c_attn": QKV},
    ),
    "ChatGLMModel": Case(
        "GlmForCausalLM",
        {
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "padded_vocab_size": 128,
            "num_layers": 3,
            "num_attention_heads": 4,
            "kv_channels": 24,
            "seq_length": 64,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "add_qkv_bias": True,
            "layernorm_epsilon": 1e-6,
            "rope_ratio": 50,
            "rmsnorm": True,
        },
        {"rms_norm_eps": 1e-6, "rope_theta": 500000.0},
        [
            (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
            ("lm_head", "transformer.output_layer"),
            (r"model\.norm", "transformer.encoder.final_layernorm"),
            (r"model\.layers", "transformer.encoder.layers"),
            (r"self_attn\.o_proj", "self_attention.dense"),
            ("gate_up_proj", "dense_h_to_4h"),
            ("down_proj", "dense_4h_to_h"),
        ],
        {"self_attention.query_key_value": QKV},
    ),
    "BailingMoeForCausalLM": Case(
        "LlamaForCausalLM",
        {
            **LLAMA,
            **MOE,
            "num_experts": 8,
            "num_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_theta": 10000.0,
            "first_k_dense_replace": 1,
        },
        rename=BAILING,
        fuse={"attention.query_key_value": QKV},
        experts=True,
    ),
    "BailingMoeV2ForCausalLM": Case(
        "Glm4MoeForCausalLM",
        {
            **LLAMA,
            **MOE,
            "head_dim": 16,
            "num_experts": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        [
            *BAILING,
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("gate.e_score_correction_bias", "gate.expert_bias"),
        ],
        {"attention.query_key_value": QKV},
    ),
    "Param2MoEForCausalLM": Case(
        "Glm4MoeForCausalLM",
        {
            **LLAMA,
            **MOE,
            "head_dim": 16,
            "num_experts": 8,
            "use_qk_norm": True,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        rename=[
            *BAILING,
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("gate.e_score_correction_bias", "gate.expert_bias"),
        ],
        fuse={"attention.query_key_value": QKV},
    ),
    "TeleFLMForCausalLM": Case(
        "GraniteForCausalLM",
        {**LLAMA, "use_mup": True, "input_mult": 3.0, "output_mult": 2.0, "mup_scale_factor": 8.0}
        | {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
        },
    ),
    "DeepseekForCausalLM": Case(
        "LlamaForCausalLM", {**LLAMA, **MOE, **ROUTED_EXPERTS}, experts=True
    ),
    "Gemma3ForConditionalGeneration": Case(
        "Gemma3ForCausalLM",
        {
            "text_config": {
                "model_type": "gemma3_text",
                **LLAMA,
                "head_dim": 24,
                "sliding_window": 4,
            }
        },
        {"num_hidden_layers": 3},
        [(r"^model\.", "model.language_model.")],
    ),
}


def build(case: Case, folder: Path) -> Any:
    """The oracle's model; saves its tensors with the names of `case` and a config to `folder`."""
    changes = {"rope_parameters": None, **case.changes}
    if "rope_scaling" in case.config and "rope_parameters" not in case.changes:
        del changes["rope_parameters"]
    model = oracle.make(case.oracle, folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    if case.experts:
        tensors = _with_experts(model, tensors)
    for new, parts in case.fuse.items():
        for first in [name for name in tensors if parts[0] in name]:
            found = [tensors.pop(first.replace(parts[0], part)) for part in parts]
            tensors[first.replace(parts[0], new)] = case.join(found)
    for old, new in case.rename:
        tensors = {re.sub(old, new, name): value for name, value in tensors.items()}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return model


def _with_experts(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the MLP of all layers but the first, in the model and in `tensors`."""
    config = DeepseekV2Config(
        **SHAPE, **MOE, **ROUTED_EXPERTS, num_attention_heads=4, topk_method="greedy"
    )
    config._experts_implementation = "eager"
    out = dict(tensors)
    for i in (1, 2):
        mlp = DeepseekV2Moe(config)
        for parameter in mlp.parameters():
            parameter.data.normal_(0, 0.08)
        model.model.layers[i].mlp = mlp
        prefix = f"model.layers.{i}.mlp."
        out = {name: value for name, value in out.items() if not name.startswith(prefix)}
        state = {prefix + name: value.data for name, value in mlp.named_parameters()}
        up, down = (state.pop(f"{prefix}experts.{n}") for n in ("gate_up_proj", "down_proj"))
        for e in range(8):
            gate, value = up[e].chunk(2)
            state[f"{prefix}experts.{e}.gate_proj.weight"] = gate.clone()
            state[f"{prefix}experts.{e}.up_proj.weight"] = value.clone()
            state[f"{prefix}experts.{e}.down_proj.weight"] = down[e].clone()
        out |= state
    return out


@pytest.mark.parametrize("architecture", CASES)
def test_logits_equal_a_renamed_hugging_face_model(architecture: str, tmp_path: Path) -> None:
    case = CASES[architecture]
    model = build(case, tmp_path)
    config = {"architectures": [architecture], **case.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error, left_over, nudged = oracle.compare(model, tmp_path)
    assert left_over == []
    assert error < 2e-5
    assert nudged > 4e-4


def test_baichuan_2_normalises_the_rows_of_its_head() -> None:
    raw = {"architectures": ["BaichuanForCausalLM"], **CASES["BaichuanForCausalLM"].config}
    assert "head" not in describe(raw).names
    assert describe({**raw, "vocab_size": 125696}).names["head"].recipe == NormalizeRows()
    rows = NormalizeRows()(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.cat)
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
