"""What a checkpoint may leave out of config.json: defaults of Hugging Face's config classes.

``scripts/config-defaults`` writes config_defaults.json from the installed transformers. Keys stand
under their most common name; ``ALIASES`` maps the other spellings to it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "attention_heads"),
    "intermediate_size": ("hidden_dim", "d_ff"),
    "max_position_embeddings": (
        *("n_positions", "seq_length", "max_seq_len", "max_position_embedding"),
    ),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"),
    "vocab_size": ("padded_vocab_size",),
    "dtype": ("torch_dtype",),
}

# Other spelling of a key -> its most common name.
CANONICAL: Mapping[str, str] = {other: name for name, others in ALIASES.items() for other in others}

# Defaults of every model, unless its own entry says otherwise.
COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_theta": 10000.0,
    "head_dim": None,
    "num_key_value_heads": None,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "rms_norm_eps": 1e-6,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "dtype": None,
}


@lru_cache(maxsize=1)
def defaults() -> Mapping[str, Mapping[str, Any]]:
    """model_type -> its defaults, with the "architecture" that it belongs to. "absent" lists keys
    that a config.json of this type need not have."""
    made: Mapping[str, Mapping[str, Any]] = json.loads(
        Path(__file__).with_suffix(".json").read_bytes()
    )
    return made


@lru_cache(maxsize=1)
def model_types() -> Mapping[str, str]:
    """architecture -> its model_type."""
    return {str(entry["architecture"]): name for name, entry in defaults().items()}
