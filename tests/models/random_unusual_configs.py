"""Random configs of the architectures of `tests/fakes/unusual_configs.py`."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.unusual_configs import UNUSUAL_CONFIGS

_BOOLS = [False, True]
_SLIDING = ("sliding_attention", "full_attention")
_MUSE = {
    "attention_bias": _BOOLS,
    "head_dim": [16, 24],
    "qk_scale_factor": [1.0, 3.87],
    "final_logit_softcapping": [20.0, 1.5],
    "output_multiplier": [0.3, 1.0],
    "post_norm_eps": [1e-8, 1e-2],
    "sliding_window": [3, 9],
}
_TOP = {"num_experts_per_tok": [1, 2, 3]}
_INKLING = {
    **_TOP,
    "swa_num_attention_heads": [2, 4],
    "swa_num_key_value_heads": [1, 2],
    "swa_head_dim": [8, 16],
    "sliding_window_size": [3, 9],
    "d_rel": [2, 5],
    "rel_extent": [4, 50],
    "log_scaling_n_floor": [None, 5],
    "log_scaling_alpha": [0.1, 0.5],
    "conv_kernel_size": [2, 4],
    "n_shared_experts": [1, 3],
    "route_scale": [1.0, 8.0],
}
# architecture -> settings to draw from
FLAGS: dict[str, dict[str, list[Any]]] = {
    "MuseGlimmerForConditionalGeneration": {**_MUSE, "hidden_activation": ["silu", "gelu"]},
    "MuseSparkForConditionalGeneration": {
        **_MUSE,
        **_TOP,
        "moe_hidden_size": [24, 64],
        "residual_gate_temperature": [0.3, 1.0],
        "routed_scaling_factor": [1.0, 2.5],
    },
    "Step3p7ForConditionalGeneration": {
        **_TOP,
        "attention_bias": _BOOLS,
        "mlp_bias": _BOOLS,
        "query_pre_attn_scalar": [None, 7],
        "moe_router_scaling_factor": [1.0, 3.0],
        "num_sliding_attention_heads": [None, 8],
        "share_expert_dim": [16, 40],
    },
    "HrmTextForCausalLM": {
        "num_hidden_layers": [1, 2],
        "H_cycles": [1, 2, 3],
        "L_cycles": [1, 2],
        "attention_bias": _BOOLS,
        "mlp_bias": _BOOLS,
        "embedding_scale": [None, 3.0],
        "head_dim": [8, 24],
    },
    "Mistral4ForCausalLM": {
        **_TOP,
        "q_lora_rank": [None, 16],
        "rope_interleave": _BOOLS,
        "first_k_dense_replace": [0, 2],
        "norm_topk_prob": _BOOLS,
        "routed_scaling_factor": [1.0, 2.0],
        "v_head_dim": [8, 24],
        "n_group": [2, 4],
        "topk_group": [2],
    },
    "ZayaForCausalLM": {
        "attention_bias": _BOOLS,
        "lm_head_bias": _BOOLS,
        "cca_time0": [1, 2, 4],
        "cca_time1": [1, 2, 3],
        "router_hidden_size": [8, 40],
        "num_experts": [1, 5],
        "sliding_window": [3, 9],
        "head_dim": [8, 24],
    },
    "Inkling2LoopForCausalLM": {
        **_TOP,
        "num_hidden_layers": [7],
        "conv_kernel_size": [1, 4],
        "loop_layer_index_start": [2, 4],
        "loop_num_passes": [1, 2, 3],
        "loop_gate_rank": [3, 16],
        "sliding_window_size": [3, 9],
        "qk_l2_clip_threshold": [0.5, 22.6],
        "tie_word_embeddings": [False],
    },
    "Inkling2ForCausalLM": {
        **_TOP,
        "swa_head_dim": [8, 16],
        "sliding_window_size": [3, 9],
        "d_rel": [2, 5],
        "rel_extent": [4, 50],
        "log_scaling_n_floor": [5, 1000],
        "conv_kernel_size": [1, 2, 4],
        "n_layers_per_attn_res_block": [1, 2, 9],
        "qk_l2_clip_threshold": [0.5, 22.6],
        "mlp_gate_softcap": [0.3, 4.0],
        "final_logit_softcapping": [2.0, 30.0],
        "scoring_func": ["sigmoid", "sqrtsoftplus"],
        "unpadded_vocab_size": [380, 384],
        "tie_word_embeddings": [False],
    },
    "InklingForCausalLM": {**_INKLING, "unpadded_vocab_size": [None, 380]},
    "Qwen4ExpForCausalLM": {
        **_TOP,
        "attention_bias": _BOOLS,
        "norm_topk_prob": _BOOLS,
        "output_gate_type": [None, "sigmoid"],
        "hc_count": [2, 3],
        "hc_lowrank": [4, 16],
        "ngram_size": [2, 3, 4],
        "heads_per_ngram": [1, 2],
        "ple_embed_dim": [None, 48],
        "ple_conv_kernel_size": [2, 4],
        "eos_token_id": [2, [7, 2]],
        "indexer_compress_ratio": [2, 4],
        "linear_num_key_heads": [1, 2, 4],
        "head_dim": [16],
    },
    "JetMoeForCausalLM": {
        **_TOP,
        "num_key_value_heads": [1, 2, 4],
        "kv_channels": [8, 24],
        "activation_function": ["silu", "gelu"],
        "tie_word_embeddings": _BOOLS,
        "rms_norm_eps": [1e-6, 1e-3],
    },
    "AXK2ForCausalLM": {
        **_TOP,
        "gated_norm_rank": [2, 8],
        "norm_topk_prob": _BOOLS,
        "mlp_layer_types": [None, ["sparse", "dense", "sparse"]],
        "v_head_dim": [8, 24],
        "index_topk": [5, 50],
    },
    "BailingHybridForCausalLM": {
        **_TOP,
        "q_lora_rank": [None, 24],
        "kda_safe_gate": _BOOLS,
        "kda_lower_bound": [-5.0, -1.0],
        "short_conv_kernel_size": [2, 4],
        "n_group": [2, 4],
        "topk_group": [2],
        "norm_topk_prob": _BOOLS,
        "n_shared_experts": [1, 2],
    },
    "DogeForCausalLM": {
        "keep_window_size": [100],  # other shapes: tests/models/test_unusual_decoders.py
        "attention_bias": _BOOLS,
        "mlp_bias": _BOOLS,
        "num_hidden_layers": [1, 3],
    },
    "RwkvForCausalLM": {
        "attention_hidden_size": [None],
        "intermediate_size": [None, 72],
        "rescale_every": [0, 1, 6],
        "num_hidden_layers": [2, 4],
        "tie_word_embeddings": _BOOLS,
    },
    "xLSTMForCausalLM": {
        "num_heads": [2, 8],
        "weight_mode": ["single"],  # its class cannot be made "fused"
        "gate_soft_cap": [2.0, 15.0],
        "output_logit_soft_cap": [2.0, 30.0],
        "ffn_proj_factor": [1.5, 2.667],
        "eps": [1e-6, 1e-2],
        "num_hidden_layers": [1, 3],
        "tie_word_embeddings": [False],
    },
    "CohereCompassForCausalLM": {
        "logit_scale": [None, 0.25],
        "sliding_window": [3, 9],
        "attention_bias": _BOOLS,
        "rope_parameters": [
            {
                "sliding_attention": None,
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
            },
        ],
    },
    "ZambaForCausalLM": {
        "n_mamba_heads": [1, 2, 4],
        "num_key_value_heads": [2, 4],
        "attention_head_dim": [None, 24],
        "layers_block_type": [None, ["hybrid", "mamba", "mamba", "mamba", "hybrid"]],
        "attn_layer_period": [1, 2],
        "attn_layer_offset": [0],
        "mamba_conv_bias": _BOOLS,
        "mamba_proj_bias": _BOOLS,
        "mamba_expand": [1, 2],
        "hidden_act": ["gelu", "silu"],
        "tie_word_embeddings": _BOOLS,
    },
    "Zamba2ForCausalLM": {
        "num_mem_blocks": [1, 2, 3],
        "use_shared_attention_adapter": _BOOLS,
        "adapter_rank": [3, 8],
        "use_mem_rope": _BOOLS,
        "use_long_context": _BOOLS,
        "mamba_ngroups": [1, 4],
        "n_mamba_heads": [4, 8],
        "add_bias_linear": _BOOLS,
        "time_step_min": [0.001, 0.5],
        "intermediate_size": [None, 72],
        "tie_word_embeddings": _BOOLS,
    },
    "CTRLLMHeadModel": {"dff": [64, 100], "n_layer": [1, 3], "layer_norm_epsilon": [1e-6, 1e-3]},
}
# layers of these types, each at least once
KINDS: dict[str, tuple[str, ...]] = {
    "CohereCompassForCausalLM": _SLIDING,
    "Qwen4ExpForCausalLM": ("linear_attention", "full_attention", "linear_attention"),
    "InklingForCausalLM": ("hybrid", "hybrid_sliding"),
    "Inkling2ForCausalLM": ("hybrid", "hybrid_sliding"),
    "Inkling2LoopForCausalLM": ("hybrid", "hybrid_sliding"),
    "ZayaForCausalLM": ("hybrid", "hybrid_sliding"),
    "MuseGlimmerForConditionalGeneration": _SLIDING,
    "MuseSparkForConditionalGeneration": _SLIDING,
    "Step3p7ForConditionalGeneration": _SLIDING,
}
_OWN_SHAPE = ("CTRLLMHeadModel", "Mistral4ForCausalLM", "JetMoeForCausalLM", "RwkvForCausalLM")
_OWN_SHAPE += ("xLSTMForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM")
_OWN_SHAPE += ("AXK2ForCausalLM", "BailingHybridForCausalLM")
_HEADS = [(4, 2), (4, 4), (8, 2), (2, 1)]


def draw(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Changes to the tiny config of `architecture`."""
    out: dict[str, Any] = {}
    for key, values in FLAGS[architecture].items():
        out[key] = rng.choice(values)
    if architecture not in _OWN_SHAPE:
        out["num_attention_heads"], out["num_key_value_heads"] = rng.choice(_HEADS)
        out["tie_word_embeddings"] = rng.random() < 0.5
        out["vocab_size"] = rng.choice([384, 391])
    kinds = KINDS.get(architecture)
    if kinds:
        count = out.setdefault("num_hidden_layers", rng.choice([2, 3, 4]))
        rest = rng.choices(kinds, k=max(0, count - len(kinds)))
        out["layer_types"] = rng.sample([*kinds, *rest], len(kinds) + len(rest))[:count]
    _ADJUST.get(architecture, lambda *_: None)(out, rng)
    text = UNUSUAL_CONFIGS[architecture].get("text_config")
    return out if text is None else {"text_config": {**text, **out}}


def _muse(out: dict[str, Any], rng: random.Random) -> None:
    count = out["num_hidden_layers"]
    out["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=count)
    if rng.random() < 0.5:
        out["layer_rope_theta"] = [rng.choice([0, 5000.0]) for _ in range(count)]


def _step(out: dict[str, Any], rng: random.Random) -> None:
    count = out["num_hidden_layers"]
    out["moe_layers_enum"] = rng.sample(range(count), rng.randrange(1, count))
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        out[key] = rng.choice([None, [rng.choice([0.0, 0.05, 0.2]) for _ in range(count)]])
    out["partial_rotary_factors"] = rng.choice(
        [None, [0.5 if kind == "full_attention" else 1.0 for kind in out["layer_types"]]]
    )


def _inkling(out: dict[str, Any], rng: random.Random) -> None:
    count = out["num_hidden_layers"]
    out["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=count)


def _qwen4(out: dict[str, Any], rng: random.Random) -> None:
    if "full_attention" not in out["layer_types"]:  # its class needs one
        out["layer_types"][-1] = "full_attention"
    linear = [i + 1 for i, kind in enumerate(out["layer_types"]) if "linear" in kind]
    out["ple_layer_ids"] = rng.sample(linear, rng.randrange(len(linear) + 1))
    if out["ngram_size"] == 4:
        out["ple_embed_dim"] = 48


_ADJUST = {
    "Qwen4ExpForCausalLM": _qwen4,
    "InklingForCausalLM": _inkling,
    "MuseGlimmerForConditionalGeneration": _muse,
    "MuseSparkForConditionalGeneration": _muse,
    "Step3p7ForConditionalGeneration": _step,
}
