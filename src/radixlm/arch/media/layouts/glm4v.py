"""GLM-4V of 2024: an encoder of its own (``models/encoders/glm4v.py``) beside ChatGLM."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout

_ENCODER: dict[str, Any] = {
    "hidden_size": 1792,
    "intermediate_size": 15360,
    "num_hidden_layers": 63,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "image_size": 1120,
    "layer_norm_eps": 1e-6,
    "scaling_factor": 8,
}


def encoder_sizes(raw: Raw) -> dict[str, Any]:
    """ValueError for another activation."""
    given = raw["vision_config"]
    if given.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"vision_config: hidden_act = {given['hidden_act']!r} is not 'gelu'")
    return {key: given.get(key, value) for key, value in _ENCODER.items()}


def _config(raw: Raw) -> dict[str, Any]:
    sizes = {"hidden_size": int(raw["hidden_size"]), "ffn_hidden_size": int(raw["ffn_hidden_size"])}
    return {**sizes, "vision_config": encoder_sizes(raw)}


LAYOUT = CheckpointLayout(_config, ((r"transformer\.vision\.", ""),))
