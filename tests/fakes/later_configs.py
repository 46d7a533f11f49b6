"""Tiny configs of the architectures whose oracle is compared through the paged path only."""

from __future__ import annotations

from typing import Any

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WIDE = {"head_dim": 24}
_SLIDING = {"head_dim": 24, "sliding_window": 7}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_NO_KV = {"num_key_value_heads": None, "intermediate_size": None}

# architecture -> what its tiny config needs beyond the common one; None drops a common key
LATER: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {**_NO_KV, "n_layer": 3, "n_head": 6, "hidden_size": 48},
    "MptForCausalLM": {
        **_NO_KV,
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 0.5},
    },
    "XGLMForCausalLM": {
        **_NO_KV,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 3,
        "attention_heads": 4,
    },
    "OpenAIGPTLMHeadModel": {**_NO_KV, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "GPTNeoXJapaneseForCausalLM": {**_NO_KV, "intermediate_multiple_size": 2},
    "Llama4ForCausalLM": {
        **_WIDE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size_mlp": 80,
        "attention_chunk_size": 11,
        "floor_scale": 8,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
    },
    "Ministral3ForCausalLM": {
        **_WIDE,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "NanoChatForCausalLM": {},
    "BitNetForCausalLM": {},
    "ApertusForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {
        **_WIDE,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "HunYuanMoEV1ForCausalLM": {**_WIDE, "num_experts": 4, "moe_topk": 2},
    "LagunaForCausalLM": {
        **_EXPERTS,
        **_SLIDING,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6, 2],
    },
    "MiMoV2FlashForCausalLM": {
        **_SLIDING,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "v_head_dim": 16,
    },
    "HYV3ForCausalLM": {**_EXPERTS, **_WIDE},
    "FlintForCausalLM": {
        **_EXPERTS,
        **_SLIDING,
        "shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
    },
    "Kolibri1ForCausalLM": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **_SLIDING,
        "shared_expert_intermediate_size": 24,
        "num_hidden_layers": 5,
    },
    "AriaTextForCausalLM": {"head_dim": 16, "moe_num_experts": 4},
    "PhimoeForCausalLM": {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "DbrxForCausalLM": {
        **_NO_KV,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "hidden_size": 64,
            "moe_num_experts": 6,
            "moe_top_k": 3,
        },
    },
    "AXK1ForCausalLM": {
        **_LATENT,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
    },
}
