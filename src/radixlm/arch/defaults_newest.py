"""Config defaults of the newest classes; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "muse_glimmer_text": {
        "architecture": "MuseGlimmerForCausalLM", "vocab_size": 202048, "hidden_size": 6656,
        "intermediate_size": 19968, "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "eos_token_id": 200001,
        "sliding_window": 2048, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-08,
        "layer_rope_theta": None,
    },
    "muse_spark_text": {
        "architecture": "MuseSparkForCausalLM", "vocab_size": 202048, "hidden_size": 8192,
        "intermediate_size": 16384, "num_hidden_layers": 62, "num_attention_heads": 128,
        "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-05, "eos_token_id": 200001, "rope_theta": 500000.0,
        "sliding_window": 2048, "final_logit_softcapping": 20.0,
        "qk_scale_factor": 5.4730064863875, "output_multiplier": 0.1767766952966369,
        "post_norm_eps": 1e-08, "layer_rope_theta": None, "moe_intermediate_size": 4096,
        "num_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0,
        "moe_hidden_size": 4096, "mlp_layer_types": None, "residual_gate_temperature": 0.3,
    },
    "step3p5": {
        "architecture": "Step3p5ForCausalLM", "vocab_size": 128815, "intermediate_size": 11264,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 128000, "rms_norm_eps": 1e-05,
        "num_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
        "share_expert_dim": 1280, "num_sliding_attention_heads": None, "mlp_layer_types": None,
        "query_pre_attn_scalar": None, "moe_router_scaling_factor": 1.0, "swiglu_limits": None,
        "swiglu_limits_shared": None, "per_layer_config": None,
    },
    "ctrl": {
        "architecture": "CTRLLMHeadModel", "vocab_size": 246534, "hidden_size": 1280, "dff": 8192,
        "num_hidden_layers": 48, "num_attention_heads": 16, "max_position_embeddings": 256,
        "layer_norm_epsilon": 1e-06, "tie_word_embeddings": True,
    },
    "embedding_gemma2_text": {
        "architecture": "EmbeddingGemma2TextModel", "vocab_size": 262144, "hidden_size": 512,
        "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 262144, "eos_token_id": 1, "sliding_window": 512,
        "hidden_size_per_layer_input": 512, "embedding_dim": 768, "per_layer_config": None,
        "global_head_dim": 512, "num_global_key_value_heads": 1, "sliding_window_pattern": 6,
        "rope_theta_by_type": {"sliding_attention": 10000.0, "full_attention": 1000000.0},
    },
    "mistral4": {
        "architecture": "Mistral4ForCausalLM", "vocab_size": 131072, "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_experts": 128,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "kv_lora_rank": 256,
        "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
        "norm_topk_prob": True, "max_position_embeddings": 1048576, "eos_token_id": 2,
        "rope_interleave": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
            "original_max_position_embeddings": 8192, "max_position_embeddings": 1048576,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "zaya": {
        "architecture": "ZayaForCausalLM", "vocab_size": 262272, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
        "moe_intermediate_size": 2048, "num_experts_per_tok": 1, "num_experts": 16,
        "eos_token_id": 106, "head_dim": 128, "lm_head_bias": False, "router_hidden_size": 256,
        "cca_time0": 2, "cca_time1": 2,
    },
    "inkling_text": {
        "architecture": "InklingForCausalLM", "vocab_size": 201024, "hidden_size": 6144,
        "num_hidden_layers": 66, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16,
        "swa_head_dim": 128, "sliding_window": 512, "d_rel": 16, "rel_extent": 1024,
        "log_scaling_n_floor": None, "log_scaling_alpha": 0.1, "max_position_embeddings": 131072,
        "conv_kernel_size": 4, "mlp_layer_types": None, "intermediate_size": 24576,
        "moe_intermediate_size": 3072, "num_experts": 256, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "route_scale": 8.0, "logits_mup_width_multiplier": 24.0,
        "eos_token_id": 2, "unpadded_vocab_size": None,
    },
    "qwen4_exp_text": {
        "architecture": "Qwen4ExpForCausalLM", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": None, "ple_embed_dim": None,
        "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234, "split_ngram_parts": 512, "indexer_n_heads": None,
        "indexer_kv_heads": None, "indexer_head_dim": None, "indexer_budget": None,
        "indexer_compress_ratio": None, "norm_topk_prob": True, "output_gate_type": None,
    },
    "hrm_text": {
        "architecture": "HrmTextForCausalLM", "vocab_size": 151808, "hidden_size": 1536,
        "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12,
        "head_dim": 128, "H_cycles": 2, "L_cycles": 3, "embedding_scale": None,
        "initializer_range": 0.02, "num_layers_per_stack": None,
    },
}
