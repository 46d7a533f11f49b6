"""Ovis 2.5: an encoder with a visual vocabulary (``models/encoders/ovis.py``) beside Qwen 3."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_NAMES: Rules = (
    (r"visual_tokenizer\.vit\.vision_model\.", "vit."),
    (r"visual_tokenizer\.head\.", "head."),
    (r"vte\.weight", "vte.weight"),
)
_ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 512,
    "patch_size": 16,
    "hidden_stride": 2,
}
# keys with the values that the encoder is written for
_FIXED = {
    "model_type": "siglip2_navit",
    "hidden_act": "gelu_pytorch_tanh",
    "num_patches": -1,
    "temporal_patch_size": 1,
    "preserve_original_pe": True,
    "use_rope": True,
    "fullatt_block_indexes": None,
}


def encoder_sizes(raw: Raw) -> dict[str, Any]:
    """ValueError for an encoder of another kind."""
    given = raw["vit_config"]
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            raise ValueError(f"vit_config: {key} = {given[key]!r} is not {value!r}")
    sizes = {key: given.get(key, value) for key, value in _ENCODER.items()}
    return {**sizes, "eps": float(given.get("layer_norm_eps", 1e-6))}


def _config(raw: Raw) -> dict[str, Any]:
    width = raw.get("hidden_size") or raw["llm_config"]["hidden_size"]
    vocab = int(raw.get("visual_vocab_size") or 65536)
    sizes = encoder_sizes(raw)
    return {"vision_config": sizes, "hidden_size": int(width), "visual_vocab_size": vocab}


LAYOUT = CheckpointLayout(_config, _NAMES)
