"""Config defaults of the classes that ``defaults.py`` does not list; see there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bloom": {
        "architecture": "BloomForCausalLM", "vocab_size": 250880, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 8, "layer_norm_epsilon": 1e-05,
        "eos_token_id": 2, "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    "mpt": {
        "architecture": "MptForCausalLM", "hidden_size": 2048, "num_attention_heads": 16,
        "num_hidden_layers": 24, "vocab_size": 50368, "layer_norm_epsilon": 1e-05,
        "attn_config": {}, "logit_scale": None, "no_bias": True, "tie_word_embeddings": True,
    },
    "xglm": {
        "architecture": "XGLMForCausalLM", "vocab_size": 256008, "hidden_size": 1024,
        "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "activation_function": "gelu", "scale_embedding": True, "eos_token_id": 2,
        "add_cross_attention": False, "tie_word_embeddings": True,
    },
    "openai-gpt": {
        "architecture": "OpenAIGPTLMHeadModel", "vocab_size": 40478,
        "max_position_embeddings": 512, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "afn": "gelu", "layer_norm_epsilon": 1e-05,
        "tie_word_embeddings": True,
    },
    "gpt_neox_japanese": {
        "architecture": "GPTNeoXJapaneseForCausalLM", "vocab_size": 32000, "hidden_size": 2560,
        "intermediate_multiple_size": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
        "eos_token_id": 31999, "tie_word_embeddings": True,
    },
    "llama4_text": {
        "architecture": "Llama4ForCausalLM", "vocab_size": 202048, "hidden_size": 5120,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "eos_token_id": 2,
        "num_experts_per_tok": 1, "num_experts": 16, "moe_layers": None,
        "interleave_moe_layer_step": 1, "use_qk_norm": True, "router_jitter_noise": 0.0,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        "rope_theta": 500000.0,
    },
    "ministral3": {
        "architecture": "Ministral3ForCausalLM", "vocab_size": 131072,
        "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
        "eos_token_id": 2,
    },
    "nanochat": {
        "architecture": "NanoChatForCausalLM", "vocab_size": 50304, "hidden_size": 768,
        "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 6,
        "hidden_act": "relu2", "final_logit_softcapping": 15.0, "eos_token_id": 1,
    },
    "bitnet": {
        "architecture": "BitNetForCausalLM", "vocab_size": 128256, "hidden_size": 2560,
        "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20,
        "num_key_value_heads": 5, "hidden_act": "relu2", "rms_norm_eps": 1e-05,
        "eos_token_id": 128001, "rope_theta": 500000.0,
    },
    "apertus": {
        "architecture": "ApertusForCausalLM", "vocab_size": 131072, "intermediate_size": 14336,
        "hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-05,
        "eos_token_id": 2, "rope_theta": 12000000.0, "rope_parameters": {"rope_type": "llama3",
        "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "hunyuan_v1_dense": {
        "architecture": "HunYuanDenseV1ForCausalLM", "vocab_size": 290943,
        "intermediate_size": 11008, "rms_norm_eps": 1e-05, "eos_token_id": 2,
    },
    "hunyuan_v1_moe": {
        "architecture": "HunYuanMoEV1ForCausalLM", "vocab_size": 290943,
        "intermediate_size": 11008, "rms_norm_eps": 1e-05, "eos_token_id": 2, "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "laguna": {
        "architecture": "LagunaForCausalLM", "vocab_size": 100352, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 512,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8, "num_experts": 256, "head_dim": 128, "gating": True,
        "num_attention_heads_per_layer": None, "mlp_layer_types": None,
        "moe_routed_scaling_factor": 1.0, "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5}, "sliding_attention": {"rope_type": "default",
        "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    },
    "mimo_v2_flash": {
        "architecture": "MiMoV2FlashForCausalLM", "vocab_size": 152576,
        "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "num_experts": 256,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "mlp_layer_types": None,
        "attention_value_scale": 0.707,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000000.0,
        "partial_rotary_factor": 0.334}, "sliding_attention": {"rope_type": "default",
        "rope_theta": 10000.0, "partial_rotary_factor": 0.334}},
    },
    "hy_v3": {
        "architecture": "HYV3ForCausalLM", "vocab_size": 120832, "intermediate_size": 13312,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "mlp_layer_types": None,
        "rope_theta": 11158840.0,
    },
    "flint": {
        "architecture": "FlintForCausalLM", "vocab_size": 150144, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 49, "num_key_value_heads": 4,
        "max_position_embeddings": 262144, "sliding_window": 513, "decoder_sparse_step": 1,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6, "num_experts": 256, "norm_topk_prob": True,
        "mlp_only_layers": None, "head_dim": 128,
    },
    "kolibri1": {
        "architecture": "Kolibri1ForCausalLM", "vocab_size": 128000, "hidden_size": 2560,
        "num_hidden_layers": 50, "num_attention_heads": 48, "num_key_value_heads": 4,
        "max_position_embeddings": 262144, "sliding_window": 513, "moe_intermediate_size": 512,
        "num_experts_per_tok": 6, "num_experts": 384, "norm_topk_prob": False, "head_dim": 128,
        "shared_expert_intermediate_size": 512,
    },
    "aria_text": {
        "architecture": "AriaTextForCausalLM", "vocab_size": 32000, "intermediate_size": 4096,
        "eos_token_id": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_num_shared_experts": 2,
    },
    "phimoe": {
        "architecture": "PhimoeForCausalLM", "vocab_size": 32064, "intermediate_size": 6400,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "eos_token_id": 2, "num_experts_per_tok": 2, "num_experts": 16,
        "router_jitter_noise": 0.01, "lm_head_bias": False, "rope_theta": 1000000.0,
    },
    "dbrx": {
        "architecture": "DbrxForCausalLM", "hidden_size": 2048, "num_attention_heads": 16,
        "num_hidden_layers": 24, "vocab_size": 32000, "attn_config": {}, "ffn_config": {},
    },
    "axk1": {
        "architecture": "AXK1ForCausalLM", "vocab_size": 163840, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
        "num_experts": 192, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 32768, "eos_token_id": 163691, "rope_interleave": True,
        "mlp_layer_types": None,
    },
}
# fmt: on
