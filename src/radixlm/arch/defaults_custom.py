"""Config defaults of models whose config classes came with the checkpoint; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch import defaults

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
    "solar": {
        "architecture": "SolarForCausalLM", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "sliding_window": 2047, "bskcn_1": [12, 20, 32, 44],
        "bskcn_2": [20, 32], "bskcn_3": [16, 24, 36, 48], "bskcn_4": [28, 40],
        "bskcn_tv": [0.9, 0.8],
    },
    "internlm": {
        "architecture": "InternLMForCausalLM", "max_position_embeddings": 2048,
    },
    "internlm2": {
        "architecture": "InternLM2ForCausalLM", "max_position_embeddings": 2048,
    },
    "llava_llama": {
        **defaults.DEFAULTS["llama"], "architecture": "LlavaLlamaForCausalLM",
    },
    "llava_mistral": {
        **defaults.DEFAULTS["mistral"], "architecture": "LlavaMistralForCausalLM",
    },
    "llava_qwen": {
        **defaults.DEFAULTS["qwen2"], "architecture": "LlavaQwenForCausalLM",
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
    "nemotron-nas": {
        "architecture": "DeciLMForCausalLM", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "intermediate_size": 1,
    },
    "phi3small": {
        "architecture": "Phi3SmallForCausalLM", "vocab_size": 100352,
        "max_position_embeddings": 8192, "rope_embedding_base": 1000000.0,
        "rope_position_scale": 1.0, "num_key_value_heads": 8, "hidden_act": "gegelu",
        "gegelu_limit": 20.0, "ff_dim_multiplier": None, "ff_intermediate_size": 14336,
        "blocksparse_homo_head_pattern": False, "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8,
        "dense_attention_every_n_layers": 2, "layer_norm_epsilon": 1e-05,
        "mup_use_scaling": True, "mup_width_multiplier": 8.0, "mup_embedding_multiplier": 10.0,
        "mup_attn_multiplier": 1.0, "eos_token_id": 100257, "tie_word_embeddings": True,
    },
    "TeleFLM": {
        "architecture": "TeleFLMForCausalLM", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05, "use_mup": False,
    },
    "step3_text": {
        "architecture": "Step3TextForCausalLM", "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 64, "num_hidden_layers": 61, "max_position_embeddings": 65536,
        "vocab_size": 128815, "rms_norm_eps": 1e-05, "moe_intermediate_size": 5120,
        "num_experts": 48, "num_experts_per_tok": 3, "rope_theta": 500000.0,
        "share_expert_dim": 5120, "share_q_dim": 2048, "head_dim": 256,
        "norm_expert_weight": False, "moe_layers_enum": None,
    },
    "yi_vl": {
        **defaults.DEFAULTS["llama"], "architecture": "YiVLForCausalLM",
    },
    "xverse": {
        "architecture": "XverseForCausalLM", "max_position_embeddings": 2048,
    },
    "xverse_moe": {
        "architecture": "XverseMoeForCausalLM", "max_position_embeddings": 2048,
        "norm_topk_prob": False,
    },
}
# fmt: on
