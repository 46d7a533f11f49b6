"""Language models inside multimodal checkpoints, by the model_type of their text_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.config_defaults import defaults

# model_type of a text_config -> that of the text model that has the same layers
TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "paddleocr_vl_text": "llama",
    "glm_ocr_text": "glm4",
    "exaone4_5_text": "exaone4",
    "phi4mm": "phi3",
    "deepseek_v2_noaux": "deepseek_v3",
    "phi4_multimodal": "phi3",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "dots3_note": "dots3_note_text",  # published with the text model's keys at the top
    "glm5_next": "glm5_next_text",
    "kimi_k2": "deepseek_v3",
    "cosmos3_edge_text": "arcee",
    "deepseek_ocr2_text": "deepseek_v2",
    "fuyu": "persimmon",  # published with the text model's keys at the top
    "hunyuan_vl": "hunyuan_v1_dense",  # published with the text model's keys at the top
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "ernie4_5_vl_moe": "ernie4_5_moe",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
}
_PHI4 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
}
_DEEPSEEK = {k: v for k, v in defaults()["deepseek_v2"].items() if k != "num_experts"}
# defaults of a text model's class where they differ from those of the class above
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"head_dim": None, "attention_bias": True},
    "glm4v_moe_text": {"head_dim": None, "attention_bias": True},
    "glm_ocr_text": {
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "attention_bias": False,
    },
    "deepseek_v2_noaux": {**_DEEPSEEK, "n_group": 1, "topk_group": 1},
    "phi4mm": _PHI4,
    "phi4_multimodal": _PHI4,
    "paddleocr_vl_text": {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "fuyu": {"partial_rotary_factor": 0.5, "rope_theta": 25000.0},
    "cosmos3_edge_text": {
        "vocab_size": 131072,
        "hidden_size": 2048,
        "intermediate_size": 9216,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_act": "relu2",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000_000.0,
            "mrope_section": [24, 20, 20],
        },
    },
    "granite_docling_text": {
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
}
