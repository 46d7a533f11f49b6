"""Tiny configs of decoders with unusual layers or composite configs; part of `decoder_configs`."""

from __future__ import annotations

from typing import Any

from tests.fakes.shapes import EXPERTS, LATENT, ROUTED

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"head_dim": 24, "sliding_window": 7}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_MUSE_TOWER = {
    **_TOWER,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
}


def whole(text: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Settings of a composite config, whose keys are those of its parts."""
    return {**dict.fromkeys(_SHAPE), **parts, "text_config": {**_SHAPE, **text}}


EMBEDDING_GEMMA2: dict[str, Any] = {
    "head_dim": 24,
    "num_key_value_heads": 2,
    "sliding_window": 7,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "embedding_dim": 40,
}
_INKLING = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "sliding_window_size": 7,
    "d_rel": 4,
    "rel_extent": 12,
    "log_scaling_n_floor": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "logits_mup_width_multiplier": 2.0,
}
_QWEN4: dict[str, Any] = {
    **EXPERTS,
    "head_dim": 16,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "heads_per_ngram": 2,
    "ngram_size": 3,
    "split_ngram_parts": 2,
    "indexer_n_heads": 24,  # with few heads many scores are zero, and any choice is right
    "indexer_kv_heads": 1,
    "indexer_head_dim": 17,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_INKLING2 = {
    "num_hidden_layers": 5,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 2,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "sliding_window_size": 7,
    "d_rel": 4,
    "rel_extent": 20,
    "log_scaling_n_floor": 9,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 0.7,
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 1.5,
    "final_logit_softcapping": 3.0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": None,
    "unpadded_vocab_size": 380,
    "route_scale": 3.0,
}
UNUSUAL_CONFIGS: dict[str, dict[str, Any]] = {
    "MuseGlimmerForConditionalGeneration": whole(
        {**_SLIDING, "output_multiplier": 0.7}, vision_config=_MUSE_TOWER
    ),
    "MuseSparkForConditionalGeneration": whole(
        {
            **_SLIDING,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_hidden_size": 40,
            "moe_intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_multiplier": 0.7,
        },
        vision_config=_MUSE_TOWER,
        audio_config={"hidden_sizes": [16] * 4, "depths": [1] * 4, "out_hidden_size": 64},
    ),
    "Step3p7ForConditionalGeneration": whole(
        {
            **_SLIDING,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_sliding_attention_heads": 6,
            "moe_layers_enum": "1,2,3",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 24,
            "swiglu_limits": [0, 0.1, None, 0.2],
            "swiglu_limits_shared": [0.05, 0.0, 0.1, 0],
        },
        vision_config={
            "hidden_size": 16,
            "mlp_ratio": 1.0,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
        },
    ),
    "HrmTextForCausalLM": {**_SHAPE, "num_hidden_layers": 2, "head_dim": 16},
    "Mistral4ForCausalLM": {
        **LATENT,
        **ROUTED,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "ZayaForCausalLM": {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "head_dim": 16,
        "router_hidden_size": 24,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 7,
    },
    "InklingForCausalLM": {**_SHAPE, **_INKLING},
    "Inkling2ForCausalLM": {**_SHAPE, **_INKLING2},
    "Inkling2LoopForCausalLM": {
        **_SHAPE,
        **_INKLING2,
        "num_hidden_layers": 7,
        "layer_types": ["hybrid_sliding", *["hybrid", "hybrid_sliding"] * 3],
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 6,
        "loop_num_passes": 3,
        "loop_gate_rank": 5,
    },
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": whole(
        {**_QWEN4, "num_hidden_layers": 3},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 64,
        },
    ),
    "JetMoeForCausalLM": {
        "num_attention_heads": None,
        "kv_channels": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "AXK2ForCausalLM": {
        **LATENT,
        **ROUTED,
        "n_group": None,
        "topk_group": None,
        "index_topk": 9,
        "index_head_dim": 16,
        "index_n_heads": 32,  # with few heads many scores are zero, and any choice is right
        "gated_norm_rank": 5,
    },
    "BailingHybridForCausalLM": {
        **LATENT,
        "q_lora_rank": None,  # transformers before 5.24 know none
        **ROUTED,
        "num_experts": 8,
        "num_local_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    # equal tokens have equal values in the first layer, so any of them may be read
    "DogeForCausalLM": {"keep_window_size": 100},
    "RwkvForCausalLM": {
        **dict.fromkeys(_SHAPE),
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "context_length": 256,
        "rescale_every": 2,
    },
    "xLSTMForCausalLM": {
        **dict.fromkeys(_SHAPE),
        "vocab_size": 384,
        "hidden_size": 128,  # the class rounds the sizes of its states to 64
        "num_hidden_layers": 3,
        "num_heads": 4,
        "gate_soft_cap": 5.0,
        "eos_token_id": 2,
    },
    "CTRLLMHeadModel": {
        **dict.fromkeys(_SHAPE),
        "vocab_size": 384,
        "n_positions": 256,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "dff": 96,
    },
    "CohereCompassForCausalLM": {
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": None,
        },
        "logit_scale": 0.7,
        "layer_norm_eps": 1e-3,
    },
    "ZambaForCausalLM": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_associative_scan": False,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "layers_block_type": ["hybrid", "linear_attention", *["hybrid"] * 4],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 6,
        "use_mem_rope": True,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "add_bias_linear": True,
    },
}
