"""Random configs of every architecture: head sizes, KV heads, ropes, biases, ties, windows."""

from __future__ import annotations

import random
from typing import Any

ROPES: list[dict[str, Any]] = [
    {},
    {"rope_type": "default", "rope_theta": 31000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "original_max_position_embeddings": 32, "attention_factor": 1.3},
]

_BIAS = {"attention_bias": [False, True]}
_MLP_BIAS = {"mlp_bias": [False, True]}
_RENORM = {"norm_topk_prob": [False, True]}
_LAYERS = ("sliding_attention", "full_attention")

# architecture -> settings to draw from; "?" marks settings that _special draws
FLAGS: dict[str, dict[str, list[Any]]] = {
    "LlamaForCausalLM": {**_BIAS, **_MLP_BIAS},
    "MistralForCausalLM": {"sliding_window": [None, 3, 100]},
    "MinistralForCausalLM": {"sliding_window": [3, 7]},
    "ArceeForCausalLM": {**_BIAS, **_MLP_BIAS},
    "SeedOssForCausalLM": {**_BIAS, **_MLP_BIAS, "attention_out_bias": [False, True]},
    "SmolLM3ForCausalLM": {**_BIAS, **_MLP_BIAS, "no_rope_layer_interval": [2, 3, 4]},
    "Qwen2ForCausalLM": {"use_sliding_window": [False, True], "max_window_layers": [0, 1, 9]},
    "Qwen3ForCausalLM": {
        **_BIAS,
        "use_sliding_window": [False, True],
        "max_window_layers": [0, 1, 9],
    },
    "Qwen2MoeForCausalLM": {
        **_RENORM,
        "qkv_bias": [False, True],
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0]],
        "use_sliding_window": [False, True],
        "max_window_layers": [1, 9],
    },
    "Qwen3MoeForCausalLM": {
        **_BIAS,
        **_RENORM,
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [1]],
    },
    "Ernie4_5ForCausalLM": {"use_bias": [False, True]},
    "GlmForCausalLM": _BIAS,
    "Glm4ForCausalLM": _BIAS,
    "Glm4MoeForCausalLM": {**_BIAS, **_RENORM, "use_qk_norm": [False, True]},
    "Phi3ForCausalLM": {"sliding_window": [None, 5]},
    "PhiForCausalLM": {"qk_layernorm": [False, True]},
    "GraniteForCausalLM": {**_BIAS, **_MLP_BIAS, "residual_multiplier": [1.0, 0.4]},
    "OlmoForCausalLM": _BIAS,
    "Olmo2ForCausalLM": _BIAS,
    "Olmo3ForCausalLM": {**_BIAS, "sliding_window": [3, 6]},
    "OlmoeForCausalLM": {**_BIAS, **_RENORM},
    "Exaone4ForCausalLM": {"sliding_window": [3, 6], "sliding_window_pattern": [2, 3, 4]},
    "GemmaForCausalLM": {**_BIAS, "hidden_act": ["gelu", "gelu_pytorch_tanh"]},
    "Gemma2ForCausalLM": {
        **_BIAS,
        "query_pre_attn_scalar": [16, 224],
        "attn_logit_softcapping": [None, 20.0],
        "final_logit_softcapping": [None, 10.0],
    },
    "Gemma3ForCausalLM": {
        **_BIAS,
        "query_pre_attn_scalar": [16, 224],
        "attn_logit_softcapping": [None, 20.0],
        "final_logit_softcapping": [None, 10.0],
        "sliding_window_pattern": [2, 3],
    },
    "CohereForCausalLM": {**_BIAS, "use_qk_norm": [False, True], "logit_scale": [0.25, 1.0]},
    "Cohere2ForCausalLM": {**_BIAS, "sliding_window": [3], "logit_scale": [0.25, 1.0]},
    "StableLmForCausalLM": {
        "use_qkv_bias": [False, True],
        "qk_layernorm": [False, True],
        "use_parallel_residual": [False, True],
    },
    "Starcoder2ForCausalLM": {"use_bias": [False, True], "sliding_window": [None, 3]},
    "NemotronForCausalLM": {**_BIAS, **_MLP_BIAS},
    "GPTNeoXForCausalLM": {**_BIAS, "use_parallel_residual": [False, True]},
    "FalconForCausalLM": {
        "bias": [False, True],
        "multi_query": [False, True],
        "parallel_attn": [False, True],
        "new_decoder_architecture": [False, True],
        "num_ln_in_parallel_attn": [None, 1, 2],
    },
    "GPT2LMHeadModel": {
        "scale_attn_weights": [False, True],
        "scale_attn_by_inverse_layer_idx": [False, True],
        "reorder_and_upcast_attn": [False, True],
        "n_inner": [None, 80],
        "activation_function": ["gelu_new", "relu", "silu", "gelu"],
    },
    "OPTForCausalLM": {
        "enable_bias": [False, True],
        "layer_norm_elementwise_affine": [False, True],
        "activation_function": ["relu", "gelu"],
    },
    "MixtralForCausalLM": {"sliding_window": [None, 4], "num_experts_per_tok": [1, 2, 3]},
    "DeepseekV2ForCausalLM": {
        **_BIAS,
        "topk_method": ["greedy", "group_limited_greedy"],
        "q_lora_rank": ["null", 24],
        "first_k_dense_replace": [0, 1, 3],
        "norm_topk_prob": [False],
    },
    "DeepseekV3ForCausalLM": {
        **_BIAS,
        **_RENORM,
        "q_lora_rank": ["null", 24],
        "rope_interleave": [False, True],
        "n_group": [2, 4],
    },
    "Dots1ForCausalLM": {**_BIAS, **_RENORM, "sliding_window": [3], "max_window_layers": [1, 9]},
    "GptOssForCausalLM": {**_BIAS, "sliding_window": [2, 5]},
    "HeliumForCausalLM": {**_BIAS, **_MLP_BIAS},
    "Jais2ForCausalLM": {**_BIAS, **_MLP_BIAS},
    "VaultGemmaForCausalLM": {
        **_BIAS,
        "attn_logit_softcapping": [None, 20.0],
        "final_logit_softcapping": [None, 10.0],
    },
    "FlexOlmoForCausalLM": {**_BIAS, **_RENORM},
    "MiniMaxM2ForCausalLM": {"partial_rotary_factor": [0.5, 1.0]},
    "HyperCLOVAXForCausalLM": {**_BIAS, **_MLP_BIAS, "use_post_norm": [False, True]},
    "YoutuForCausalLM": {**_BIAS, "q_lora_rank": ["null", 24], "rope_interleave": [False, True]},
    "Glm4MoeLiteForCausalLM": {
        **_BIAS,
        **_RENORM,
        "q_lora_rank": ["null", 24],
        "n_group": [2, 4],
        "topk_group": [2],
    },
    "SolarOpenForCausalLM": {**_BIAS, **_RENORM},
    "ExaoneMoeForCausalLM": {
        **_RENORM,
        "num_shared_experts": [1, 2],
        "first_k_dense_replace": [0, 1],
        "sliding_window_pattern": [2, 3, 4],
    },
    "MiniCPM3ForCausalLM": {
        **_BIAS,
        **_MLP_BIAS,
        "q_lora_rank": ["null", 24],
        "dim_model_base": [16, "null"],
        "scale_depth": [1.4, "null"],
        "v_head_dim": [8, "null"],
    },
    "GraniteMoeForCausalLM": _BIAS,
    "GraniteMoeSharedForCausalLM": {**_BIAS, "shared_intermediate_size": [0, 24]},
    "CwmForCausalLM": {**_MLP_BIAS, "sliding_window": [3]},
    "PersimmonForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {
        "use_bias": [False, True],
        "moe_num_shared_experts": [0, 1, 2],
        "moe_layer_start_index": [0, 1],
        "moe_layer_interval": [1, 2],
    },
    "AfmoeForCausalLM": {
        "mup_enabled": [False, True],
        "global_attn_every_n_layers": [2, 3],
        "num_dense_layers": [0, 1],
        "num_shared_experts": [1, 2],
    },
    "Cohere2MoeForCausalLM": {
        **_BIAS,
        **_RENORM,
        "num_shared_experts": [0, 2],
        "shared_expert_combination_strategy": ["sum", "average"],
        "expert_selection_fn": ["sigmoid", "softmax"],
        "first_k_dense_replace": [0, 1, 2],
        "prefix_dense_sliding_window_pattern": [1, 2],
        "rms_norm_eps": [None, 1e-6],
    },
}

ONE_KIND_OF_HEAD = {
    *("GPTNeoXForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "FalconForCausalLM"),
    "PersimmonForCausalLM",
}
LATENT = {
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "YoutuForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM"),
}
OWN_HEAD_DIM = {
    *("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "ArceeForCausalLM"),
    *("SeedOssForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Ernie4_5ForCausalLM"),
    *("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GemmaForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "NemotronForCausalLM", "MixtralForCausalLM"),
    *("Exaone4ForCausalLM", "GptOssForCausalLM", "Dots1ForCausalLM"),
    *("VaultGemmaForCausalLM", "MiniMaxM2ForCausalLM", "HyperCLOVAXForCausalLM"),
    *("SolarOpenForCausalLM", "ExaoneMoeForCausalLM", "CwmForCausalLM", "AfmoeForCausalLM"),
    *("Ernie4_5_MoeForCausalLM", "Cohere2MoeForCausalLM"),
}
# Architectures whose config takes layer_types; the others derive them.
LAYERED = {
    *("MinistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM"),
    *("Exaone4ForCausalLM", "Cohere2ForCausalLM", "GptOssForCausalLM", "Dots1ForCausalLM"),
    *("VaultGemmaForCausalLM", "CwmForCausalLM", "AfmoeForCausalLM", "Cohere2MoeForCausalLM"),
    "ExaoneMoeForCausalLM",
}
BY_LAYER = {"Olmo3ForCausalLM", "Gemma3ForCausalLM"}
PARTIAL = {
    *("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "PhiForCausalLM"),
    *("Phi3ForCausalLM", "StableLmForCausalLM", "NemotronForCausalLM", "GPTNeoXForCausalLM"),
    "PersimmonForCausalLM",
}


def draw(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Changes to the tiny config of `architecture` (None removes a key)."""
    heads, ratio = rng.choice([(4, 2), (4, 4), (6, 3), (6, 1), (8, 2), (2, 1)])
    dim = rng.choice([8, 16, 24])
    out: dict[str, Any] = {"num_attention_heads": heads, "hidden_size": heads * dim}
    if architecture == "GPT2LMHeadModel":
        out = {"n_head": heads, "n_embd": heads * dim, "num_attention_heads": None}
        out["hidden_size"] = None
    elif architecture in LATENT:
        out["num_key_value_heads"] = heads
    elif architecture not in ONE_KIND_OF_HEAD:
        out["num_key_value_heads"] = heads // ratio if heads % ratio == 0 else heads
    if architecture in OWN_HEAD_DIM:
        out["head_dim"] = dim = rng.choice([8, 16, 32])
        out["hidden_size"] = heads * rng.choice([8, 12])
    out["vocab_size"] = rng.choice([128, 131])
    out["tie_word_embeddings"] = rng.random() < 0.5
    out["num_hidden_layers"] = rng.choice([2, 3, 4])
    if architecture == "GPT2LMHeadModel":
        out["n_layer"], out["num_hidden_layers"] = out["num_hidden_layers"], None
    for key, values in FLAGS[architecture].items():
        out[key] = rng.choice(values)
    if architecture == "FalconForCausalLM":
        out["num_kv_heads"] = heads // 2 if heads % 2 == 0 else heads
        if not out["new_decoder_architecture"]:
            out["num_kv_heads"], out["num_ln_in_parallel_attn"] = heads, None
        else:
            out["parallel_attn"] = True
    if architecture in LAYERED and rng.random() < 0.5:
        out["layer_types"] = rng.choices(_LAYERS, k=out["num_hidden_layers"])
    if architecture == "HeliumForCausalLM":
        out["head_dim"] = dim
    if "partial_rotary_factor" in out:
        out["rope_parameters"] = None
        return out
    _rope(architecture, rng, out, 8 if architecture in LATENT else dim)
    return out


def _rope(architecture: str, rng: random.Random, out: dict[str, Any], dim: int) -> None:
    if architecture in ("GPT2LMHeadModel", "OPTForCausalLM"):
        return
    p = dict(rng.choice(ROPES))
    if architecture in LATENT and p.get("rope_type") == "dynamic":
        p = {}
    if architecture == "Phi3ForCausalLM" and p:
        p = dict(ROPES[-1])
        out["original_max_position_embeddings"] = 32
    if not p:
        out["rope_parameters"] = None
        return
    p.setdefault("rope_theta", rng.choice([10000.0, 500000.0]))
    turned = dim
    if architecture in PARTIAL:
        p["partial_rotary_factor"] = rng.choice([0.5, 1.0])
        turned = int(dim * p["partial_rotary_factor"])
    if p["rope_type"] == "longrope":
        p["short_factor"] = [1 + 0.1 * i for i in range(turned // 2)]
        p["long_factor"] = [1.5 + 0.3 * i for i in range(turned // 2)]
    if architecture in BY_LAYER:
        other = {"rope_type": "default", "rope_theta": 8000.0}
        p = {"full_attention": p, "sliding_attention": other}
        p["full_attention"].pop("truncate", None)
    out["rope_parameters"] = p
