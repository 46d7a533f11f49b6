"""Random configs of the architectures of `tests/fakes/decoder_configs.py`."""

from __future__ import annotations

import random
from typing import Any

from tests.models import random_unusual_configs

_BIAS = {"attention_bias": [False, True]}
_MLP_BIAS = {"mlp_bias": [False, True]}
_RENORM = {"norm_topk_prob": [False, True]}
_TOP = {"num_experts_per_tok": [1, 2, 3]}
_LINEAR = ("linear_attention", "full_attention")
_SLIDING = ("sliding_attention", "full_attention")
_MAMBA = {
    "mamba_d_state": [4, 16],
    "mamba_n_groups": [1, 2, 4],
    "mamba_d_conv": [2, 4],
    "mamba_conv_bias": [False, True],
}
_STATE = {"state_size": [4, 16], "conv_kernel": [2, 4], "use_bias": [False, True]}
_HEADS = [(4, 2), (4, 4), (6, 3), (6, 1), (8, 2), (2, 1)]

# architecture -> settings to draw from
FLAGS: dict[str, dict[str, list[Any]]] = {
    **random_unusual_configs.FLAGS,
    "BloomForCausalLM": {"apply_residual_connection_post_layernorm": [False, True]},
    "MptForCausalLM": {
        "attn_config": [{}, {"clip_qkv": 0.2}, {"alibi_bias_max": 4, "softmax_scale": 0.3}]
    },
    "XGLMForCausalLM": {"scale_embedding": [False, True], "activation_function": ["gelu", "relu"]},
    "OpenAIGPTLMHeadModel": {"afn": ["gelu", "relu", "silu"]},
    "GPTNeoXJapaneseForCausalLM": {"rotary_pct": [1.0, 0.5], "hidden_act": ["gelu", "relu"]},
    "Llama4ForCausalLM": {
        **_BIAS,
        **_TOP,
        "use_qk_norm": [False, True],
        "attn_temperature_tuning": [False, True],
        "attention_chunk_size": [3, 8, 100],
        "no_rope_layer_interval": [2, 3, 4],
        "interleave_moe_layer_step": [1, 2],
    },
    "Ministral3ForCausalLM": {"sliding_window": [None, 5]},
    "NanoChatForCausalLM": {**_BIAS, "final_logit_softcapping": [None, 5.0]},
    "BitNetForCausalLM": {**_BIAS, "hidden_act": ["relu2", "silu"]},
    "ApertusForCausalLM": {**_BIAS, "hidden_act": ["xielu", "silu", "relu2"]},
    "Apertus1p5TextForCausalLM": {**_BIAS, "output_vocab_size": [None, 384, 381]},
    "LaraMiniForCausalLM": {**_BIAS, **_TOP, **_RENORM, "sliding_window": [3, 8]},
    "HunYuanDenseV1ForCausalLM": _BIAS,
    "HunYuanMoEV1ForCausalLM": {**_BIAS, "moe_topk": [1, 2, 3]},
    "LagunaForCausalLM": {
        **_TOP,
        **_BIAS,
        "gating": [True, "per-head", "per-element"],
        "moe_routed_scaling_factor": [1.0, 2.5],
        "moe_router_logit_softcapping": [0.0, 1.5],
        "mlp_layer_types": [None],
    },
    "MiMoV2FlashForCausalLM": {
        **_RENORM,
        "attention_value_scale": [1.0, 0.707],
        "v_head_dim": [8, 24],
        "routed_scaling_factor": [1.0, 2.0],
    },
    "HYV3ForCausalLM": {**_TOP, **_BIAS, "num_shared_experts": [1, 2]},
    "FlintForCausalLM": {**_TOP, **_RENORM, "mlp_only_layers": [[0], [0, 1], []]},
    "Kolibri1ForCausalLM": {**_TOP, **_RENORM},
    "AriaTextForCausalLM": {**_BIAS, "moe_topk": [1, 2], "moe_num_shared_experts": [1, 2]},
    "PhimoeForCausalLM": {
        **_BIAS,
        "router_jitter_noise": [0.01, 0.5],
        "lm_head_bias": [False, True],
        "num_experts_per_tok": [2],
    },
    "AXK1ForCausalLM": {**_RENORM, "rope_interleave": [False, True], "n_group": [2, 4]},
    "MambaForCausalLM": {**_STATE, "use_conv_bias": [False, True], "time_step_rank": [2, 5]},
    "FalconMambaForCausalLM": {**_STATE, "use_conv_bias": [False, True]},
    "Mamba2ForCausalLM": {**_STATE, "n_groups": [1, 2, 4], "use_conv_bias": [False, True]},
    "JambaForCausalLM": {
        "mamba_d_state": [4, 16],
        "mamba_proj_bias": [False, True],
        "num_experts": [1, 4],
        "attn_layer_offset": [0, 1],
        "expert_layer_offset": [0, 1],
    },
    "BambaForCausalLM": {
        **_MAMBA,
        **_BIAS,
        **_MLP_BIAS,
        "attn_layer_indices": [[0], [1], [0, 1]],
        "mamba_proj_bias": [False, True],
    },
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA,
        **_BIAS,
        "num_local_experts": [0, 4],
        "position_embedding_type": [None, "rope"],
    },
    "FalconH1ForCausalLM": {
        **_MAMBA,
        "mamba_rms_norm": [False, True],
        "mamba_norm_before_gate": [False, True],
    },
    "NemotronHForCausalLM": {
        **_RENORM,
        "n_groups": [1, 2, 4],
        "attention_bias": [False, True],
        "mlp_bias": [False],
        "moe_latent_size": [None, 24],
        "mlp_hidden_act": ["relu2", "silu"],
        "layers_block_type": [
            ["linear_attention", "full_attention", "mlp"],
            ["moe", "full_attention", "linear_attention"],
            ["full_attention", "moe", "linear_attention", "mlp", "linear_attention"],
        ],
    },
    "Qwen3NextForCausalLM": {
        **_TOP,
        **_RENORM,
        **_BIAS,
        "mlp_only_layers": [[], [0]],
        "decoder_sparse_step": [1, 2],
        "linear_num_key_heads": [1, 2, 4],
        "linear_conv_kernel_dim": [2, 4],
    },
    "Qwen3_5ForCausalLM": {**_BIAS, "linear_num_key_heads": [1, 2, 4]},
    "Qwen3_5MoeForCausalLM": {**_TOP, **_BIAS, "linear_num_key_heads": [1, 2, 4]},
    "OlmoHybridForCausalLM": {**_BIAS, "linear_allow_neg_eigval": [False, True]},
    "KimiLinearForCausalLM": {
        "moe_renormalize": [False, True],
        "linear_num_heads": [1, 3],
        "num_expert_group": [1, 2],
        "q_lora_rank": [None],
    },
    "MiniMaxForCausalLM": {**_TOP, "full_attn_beta_factor": [1, 0.6]},
    "Lfm2ForCausalLM": {
        "conv_bias": [False, True],
        "conv_L_cache": [2, 3, 4],
        "block_auto_adjust_ff_dim": [False, True],
        "block_multiple_of": [16, 32],
    },
    "Lfm2MoeForCausalLM": {**_TOP, **_RENORM, "use_expert_bias": [False, True]},
    "DeepseekV4ForCausalLM": {
        **_TOP,
        **_MLP_BIAS,
        "layer_types": [
            None,
            ["sliding_attention"] * 4,
            ["compressed_sparse_attention"] * 3 + ["heavily_compressed_attention"],
        ],
        "compress_rates": [
            {"compressed_sparse_attention": 1, "heavily_compressed_attention": 2},
            {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            {"compressed_sparse_attention": 7, "heavily_compressed_attention": 50},
            None,
        ],
        "scoring_func": ["sqrtsoftplus", "sigmoid"],
        "num_hash_layers": [0, 2, None],
        "sliding_window": [1, 4, 30],
        "index_topk": [1, 4, 100],
        "index_head_dim": [8, 17],
        "o_groups": [1, 4],
        "hc_mult": [1, 2, 4],
        "hc_sinkhorn_iters": [1, 20],
        "swiglu_limit": [0.3, 10.0],
        "rope_scaling": [
            None,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ],
    },
    "Glm5NextForCausalLM": {
        **_TOP,
        "hidden_act": ["silu", "gelu"],
        **_RENORM,
        **_BIAS,
        "index_topk": [12, 60],
        "index_kpool": [1, 2, 6],
        "layer_types": [
            None,
            ["indexed_attention"] * 4 + ["linear_attention"],
            ["linear_attention", "full_attention"] * 2 + ["indexed_attention"],
        ],
        "indexer_types": [None],
        "mlp_layer_types": [None, ["sparse", "dense"] * 2 + ["sparse"]],
        "linear_num_heads": [1, 3],
        "linear_conv_kernel_dim": [2, 4],
        "linear_lower_bound": [-5.0, -0.5],
        "hc_mult": [1, 2, 4],
        "hc_sinkhorn_iters": [1, 20],
        "swiglu_limit": [0.3, 10.0],
        "n_group": [1, 2],
    },
    "MistralLarge4ForCausalLM": {
        **_TOP,
        **_BIAS,
        "index_topk": [3, 20, 100],
        "indexer_types": [None, ["full"] * 6],
        "no_rope_layers": [[1, 0] * 3],
        "kv_source_layers": [[0, 1, 0, 1, 4, 5], [0, 1, 2, 3, 2, 3]],
        "mlp_layer_types": [None, ["sparse", "dense"] * 3],
        "final_logit_softcapping": [3.0, 30.0],
        "n_group": [1, 2],
        "topk_group": [1],
    },
    "MiniMaxM3VLForCausalLM": {
        **_TOP,
        "partial_rotary_factor": [None, 0.5],
        "index_n_heads": [1, 2],
        "index_head_dim": [24, 31],
        "index_block_size": [1, 4, 100],
        "index_topk_blocks": [1, 2, 5],
        "index_local_blocks": [0, 1],
        "swiglu_limit": [0.3, 7.0],
        "routed_scaling_factor": [1.0, 2.0],
        "layer_types": [None],
        "mlp_layer_types": [None],
    },
    "Dots3NoteForCausalLM": {
        **_TOP,
        **_RENORM,
        **_BIAS,
        "index_topk": [3, 20, 100],
        "sliding_window": [3, 9, None],
        "use_dsa": [False, True, None],
        "use_sliding_window": [False, True, True],
        "layer_types": [None, None, ["full_attention", "sliding_attention"] * 2],
        "first_k_dense_replace": [0, 2],
        "moe_layer_freq": [1, 2, [0, 1, 0, 1]],
        "rope_theta": [10000.0, 1000000.0],
        "swa_rope_theta": [50000.0, 500.0],
        "swa_qk_rope_head_dim": [None, 6],
        "rope_scaling": [None, None, {"rope_type": "linear", "factor": 4.0}],
        "n_shared_experts": [1, 2],
        "n_group": [1, 2],
    },
    "HYV4ForCausalLM": {
        **_TOP,
        "hidden_act": ["silu", "gelu"],
        **_RENORM,
        **_BIAS,
        "index_topk": [3, 20, 100],
        "indexer_types": [None, ["full"] * 4, ["full", "shared", "shared", "full"]],
        "mlp_layer_types": [None, ["sparse", "dense", "dense", "sparse"]],
        "hc_mult": [1, 2, 4],
        "swiglu_limit": [0.3, 10.0],
        "n_group": [1, 2],
        "topk_group": [1],
    },
    "RecurrentGemmaForCausalLM": {
        "attention_window_size": [3, 9],
        "logits_soft_cap": [30.0, 2.0],
        "conv1d_width": [3, 4],
    },
}
_KINDS = {
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _LINEAR
    ),
    **dict.fromkeys(("MiniMaxForCausalLM", "OlmoHybridForCausalLM"), _LINEAR),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM"), _LINEAR),
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), ("conv", "full_attention")),
    **dict.fromkeys(("LagunaForCausalLM", "MiMoV2FlashForCausalLM"), _SLIDING),
    **dict.fromkeys(("FlintForCausalLM", "Kolibri1ForCausalLM"), _SLIDING),
    "MiniMaxM3VLForCausalLM": ("minimax_m3_sparse", "full_attention"),
    "LaraMiniForCausalLM": (*_LINEAR, "sliding_attention"),
}
# their heads depend on other settings, or they have none
OWN_SHAPE = {
    *("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM", "AXK1ForCausalLM"),
    *("KimiLinearForCausalLM", "LagunaForCausalLM", "RecurrentGemmaForCausalLM"),
    *(
        "MistralLarge4ForCausalLM",
        "HYV4ForCausalLM",
        "Dots3NoteForCausalLM",
        "Glm5NextForCausalLM",
        "DeepseekV4ForCausalLM",
    ),
}
_NAMES = {
    "BloomForCausalLM": ("n_head", "hidden_size", "n_layer"),
    "MptForCausalLM": ("n_heads", "d_model", "n_layers"),
    "XGLMForCausalLM": ("attention_heads", "d_model", "num_layers"),
    "OpenAIGPTLMHeadModel": ("n_head", "n_embd", "n_layer"),
    "GPTNeoXJapaneseForCausalLM": ("num_attention_heads", "hidden_size", "num_hidden_layers"),
}


def draw(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Changes to the tiny config of `architecture`."""
    if architecture in random_unusual_configs.FLAGS:
        return random_unusual_configs.draw(architecture, rng)
    out: dict[str, Any] = {"vocab_size": rng.choice([384, 391])}
    out["tie_word_embeddings"] = rng.random() < 0.5
    heads, kv_heads = rng.choice(_HEADS)
    count = rng.choice([2, 3, 4])
    if architecture == "MiMoV2FlashForCausalLM":  # its window layers have twice as many
        kv_heads = min(kv_heads, heads // 2)
    if architecture in _NAMES:
        names = _NAMES[architecture]
        out |= dict(zip(names, (heads, heads * rng.choice([8, 16]), count), strict=True))
    elif architecture not in OWN_SHAPE:
        out |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        out["hidden_size"] = heads * 16
        if architecture in _MAMBA_OF:
            out["hidden_size"] = 64 if heads in (2, 4, 8) else 96
            out["mamba_n_heads"] = out["hidden_size"] // 8
            if architecture == "FalconH1ForCausalLM":
                out["mamba_d_ssm"] = 2 * out["hidden_size"]
                out["mamba_n_groups"] = rng.choice([1, 2])
        if architecture != "NemotronHForCausalLM":
            out["num_hidden_layers"] = count
    for key, values in FLAGS[architecture].items():
        out.setdefault(key, rng.choice(values))
    if out.get("output_vocab_size"):  # a head of fewer rows than the table
        out["tie_word_embeddings"] = False
    kinds = _KINDS.get(architecture)
    if kinds and architecture != "LagunaForCausalLM":
        layers = out.get("num_hidden_layers", 4)
        rest = rng.choices(kinds, k=max(0, layers - len(kinds)))
        out["layer_types"] = rng.sample([*kinds, *rest], layers)
    return out


_MAMBA_OF = ("BambaForCausalLM", "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM")
