"""Moondream 2 and 3; the encoder is ``models/encoders/moondream.py``'s. What reads and writes
coordinates is left out."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_BLOCK, _LAYER = r"model\.vision\.blocks\.(\d+)\.", r"encoder.layers.\1."
_NAMES: Rules = (
    (_BLOCK + r"attn\.qkv\.", _LAYER + "self_attn.[q|k|v]_proj."),
    (_BLOCK + r"attn\.proj\.", _LAYER + "self_attn.out_proj."),
    (_BLOCK + r"ln(\d)\.", _LAYER + r"layer_norm\2."),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
    (r"model\.vision\.", ""),
    (r"model\.region\.", "region."),
)
_SIZES = {
    "enc_dim": 1152,
    "enc_patch_size": 14,
    "enc_n_layers": 27,
    "enc_ff_dim": 4304,
    "enc_n_heads": 16,
    "crop_size": 378,
    "in_channels": 3,
    "max_crops": 12,
    "overlap_margin": 4,
    "proj_inner_dim": 8192,
}


def sizes_of(raw: Raw) -> dict[str, int]:
    """Of the encoder and of an image's crops. ValueError for sizes that do not fit together."""
    given = (raw.get("config") or {}).get("vision") or {}
    sizes = {key: int(given.get(key, value)) for key, value in _SIZES.items()}
    per_side = sizes["crop_size"] // sizes["enc_patch_size"]
    if sizes["crop_size"] % sizes["enc_patch_size"] or per_side <= 2 * sizes["overlap_margin"]:
        raise ValueError(f"crop_size {sizes['crop_size']}, overlap_margin of {per_side} patches")
    return sizes


def _config(raw: Raw) -> dict[str, Any]:
    sizes = sizes_of(raw)
    text = (raw.get("config") or {}).get("text") or {}
    encoder = {
        "hidden_size": sizes["enc_dim"],
        "intermediate_size": sizes["enc_ff_dim"],
        "num_hidden_layers": sizes["enc_n_layers"],
        "num_attention_heads": sizes["enc_n_heads"],
        "num_channels": sizes["in_channels"],
        "image_size": sizes["crop_size"],
        "patch_size": sizes["enc_patch_size"],
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
    }
    return {
        "vision_config": encoder,
        "hidden_size": int(text.get("dim", 2048)),
        "margin": sizes["overlap_margin"],
        "inner": sizes["proj_inner_dim"],
    }


LAYOUT = CheckpointLayout(_config, _NAMES)
