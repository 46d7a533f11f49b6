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
}
