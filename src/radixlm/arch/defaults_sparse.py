"""Config defaults of the classes of ``families/sparse.py``; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "hy_v4": {
        "architecture": "HYV4ForCausalLM", "vocab_size": 120832, "hidden_size": 2816,
        "intermediate_size": 6912, "moe_intermediate_size": 768, "num_hidden_layers": 34,
        "num_key_value_heads": 32, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
        "eos_token_id": 120025, "num_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.827, "norm_topk_prob": True,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "mlp_layer_types": None, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
        "indexer_types": None, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-06,
        "swiglu_limit": 10.0,
    },
    "dots3_note_text": {
        "architecture": "Dots3NoteForCausalLM", "vocab_size": 152064, "hidden_size": 5120,
        "intermediate_size": 13824, "moe_intermediate_size": 1536, "num_hidden_layers": 46,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "num_experts": 256, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
        "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 524288, "rms_norm_eps": 1e-05, "eos_token_id": 151668,
        "mlp_layer_types": None, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
        "head_dim": 256, "shared_experts_intermediate_size": 1536, "rope_theta": 80000000.0,
    },
    "minimax_m3_vl_text": {
        "architecture": "MiniMaxM3VLForCausalLM", "vocab_size": 200064, "hidden_size": 6144,
        "intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 524288,
        "eos_token_id": 200020, "num_experts_per_tok": 4, "num_experts": 128,
        "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "mlp_layer_types": None, "index_n_heads": 4, "index_head_dim": 128,
        "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1,
        "rope_theta": 5000000.0,
    },
    "glm5_next_text": {
        "architecture": "Glm5NextForCausalLM", "vocab_size": 154880, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "num_hidden_layers": 45, "num_attention_heads": 64,
        "num_key_value_heads": 64, "n_shared_experts": 1, "num_experts": 288,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 0, "v_head_dim": 256, "qk_nope_head_dim": 256, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-05, "mlp_layer_types": None,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "indexer_types": None,
        "swiglu_limit": 10.0, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "hc_mult": 4, "hc_eps": 1e-06,
        "hc_sinkhorn_iters": 20, "index_kpool": 16, "index_kpool_always_select_tail": True,
    },
    "deepseek_v4": {
        "architecture": "DeepseekV4ForCausalLM", "vocab_size": 129280,
        "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "num_experts": 256,
        "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576, "eos_token_id": 1, "compress_rates": None,
        "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
        "mlp_layer_types": None, "swiglu_limit": 10.0, "sliding_window": 128, "o_groups": 8,
        "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "partial_rotary_factor": None,
    },
}
