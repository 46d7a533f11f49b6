"""Config defaults of classes that see; see ``defaults.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "chameleon": {
        "architecture": "ChameleonForConditionalGeneration", "vocab_size": 65536,
        "intermediate_size": 11008, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05, "bos_token_id": 1, "eos_token_id": 2, "swin_norm": False,
    },
    "molmo2_text": {
        "architecture": "Molmo2ForConditionalGeneration", "vocab_size": 151936,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "max_position_embeddings": 36864,
        "additional_vocab_size": 128, "qk_norm_type": "qwen3", "rope_scaling_layers": None,
        "norm_after": False,
    },
}
