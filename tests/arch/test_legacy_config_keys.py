"""Legacy keys that Hugging Face's config classes convert: both spellings give the same record."""

from __future__ import annotations

from typing import Any

import pytest

from radixlm.arch.hf import describe

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
KIMI = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_renormalize": True,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
}
KIMI_KINDS = ["linear_attention", "full_attention", "linear_attention"] * 2
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full_attention_interval": (
        "Qwen3NextForCausalLM",
        {**SHAPE, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
        {"full_attention_interval": 3},
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
    ),
    "linear_attn_config": (
        "KimiLinearForCausalLM",
        {**SHAPE, **EXPERTS, **KIMI},
        {
            "first_k_dense_replace": 2,
            "linear_attn_config": {
                "full_attn_layers": [2, 5],
                "kda_layers": [1, 3, 4, 6],
                "num_heads": 2,
                "head_dim": 16,
                "short_conv_kernel_size": 3,
            },
        },
        {
            "layer_types": KIMI_KINDS,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "tie_embedding": (
        "Lfm2ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 3},
        {"tie_embedding": False},
        {"tie_word_embeddings": False},
    ),
    "sliding_window_size": (
        "MiMoV2FlashForCausalLM",
        {**SHAPE, **EXPERTS, "head_dim": 24, "num_key_value_heads": 2, "v_head_dim": 16},
        {"sliding_window_size": 7, "sliding_window": 7},
        {"sliding_window": 8},
    ),
    "a word of windows": (
        "Exaone4ForCausalLM",
        {**SHAPE, "model_type": "exaone4", "num_key_value_heads": 2, "sliding_window": 7},
        {"sliding_window_pattern": "LLG"},
        {"sliding_window_pattern": 3},
    ),
    "no windows": (
        "Exaone4ForCausalLM",
        {**SHAPE, "model_type": "exaone4", "num_key_value_heads": 2},
        {"sliding_window": None, "sliding_window_pattern": None},
        {"sliding_window": None, "layer_types": ["full_attention"] * 6},
    ),
    "counts by layer": (
        "HunYuanMoEV1ForCausalLM",
        {**SHAPE, "model_type": "hunyuan_v1_moe", "intermediate_size": 24},
        {"num_experts": [4] * 6, "moe_topk": [2] * 6, "moe_intermediate_size": [24] * 6},
        {"num_experts": 4, "moe_topk": 2},
    ),
    "rotary_dim": (
        "MiniMaxM2ForCausalLM",
        {
            **SHAPE,
            **EXPERTS,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "model_type": "minimax_m2",
            "intermediate_size": 32,
        },
        {"rotary_dim": 8},
        {"partial_rotary_factor": 0.5},
    ),
    "mamba_d_conv": (
        "NemotronHForCausalLM",
        {
            **SHAPE,
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M*M-",
            "num_key_value_heads": 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
        },
        {"mamba_d_conv": 3, "mamba_n_groups": 2, "mamba_dt_min": 0.1, "mamba_conv_bias": False},
        {"conv_kernel": 3, "n_groups": 2, "time_step_min": 0.1, "use_conv_bias": False},
    ),
    "local_rope_theta": (
        "ModernBertDecoderForCausalLM",
        {**SHAPE, "model_type": "modernbert-decoder"},
        {"global_rope_theta": 80000.0, "local_rope_theta": 160000.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 80000.0},
                "sliding_attention": {"rope_theta": 160000.0},
            }
        },
    ),
    "widths of LongCat": (
        "LongcatFlashForCausalLM",
        {**SHAPE, "model_type": "longcat_flash"},
        {"intermediate_size": 48, "moe_intermediate_size": 24},
        {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
    ),
    "attention_layers": (
        "GPTNeoForCausalLM",
        SHAPE,
        {"attention_layers": ["global", "global", "local"] * 2},
        {"attention_types": [[["global", "global", "local"], 2]]},
    ),
}


@pytest.mark.parametrize("key", CASES)
def test_the_legacy_key_gives_the_same_record(key: str) -> None:
    architecture, shape, older, newer = CASES[key]
    common = {"architectures": [architecture], **shape}
    assert describe({**common, **older}) == describe({**common, **newer})
    assert describe({**common, **older}) != describe(common)


def test_llama_4_wrote_a_number_for_a_flag() -> None:
    shape = {**SHAPE, "model_type": "llama4_text", "num_key_value_heads": 2}
    common = {"architectures": ["Llama4ForCausalLM"], **shape}
    assert describe({**common, "attn_temperature_tuning": 4}) == describe(common)
