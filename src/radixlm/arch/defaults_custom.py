"""Config defaults of models whose config classes came with the checkpoint; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "baichuan": {
        "architecture": "BaichuanForCausalLM", "max_position_embeddings": 4096,
    },
    "bailing_moe": {
        "architecture": "BailingMoeForCausalLM", "rope_theta": 600000.0,
    },
    "bailing_moe_v2": {
        "architecture": "BailingMoeV2ForCausalLM", "rope_theta": 600000.0,
    },
    "chatglm": {
        "architecture": "ChatGLMModel",
    },
    "deepseek": {
        "architecture": "DeepseekForCausalLM", "max_position_embeddings": 2048,
        "n_shared_experts": None, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
    },
    "exaone": {
        "architecture": "ExaoneForCausalLM", "activation_function": "silu",
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048,
    },
    "internlm": {
        "architecture": "InternLMForCausalLM", "max_position_embeddings": 2048,
    },
    "internlm2": {
        "architecture": "InternLM2ForCausalLM", "max_position_embeddings": 2048,
    },
    "mimo": {
        "architecture": "MiMoForCausalLM", "attention_bias": True, "max_position_embeddings": 32768,
    },
    "minicpm": {
        "architecture": "MiniCPMForCausalLM", "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "orion": {
        "architecture": "OrionForCausalLM", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
    },
    "qwen": {
        "architecture": "QWenLMHeadModel", "layer_norm_epsilon": 1e-06,
    },
    "xverse": {
        "architecture": "XverseForCausalLM", "max_position_embeddings": 2048,
    },
}
# fmt: on
