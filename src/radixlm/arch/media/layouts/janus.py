"""Janus and Janus-Pro as published: the part that reads images; the one that generates them is left
out."""

from collections.abc import Mapping
from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub

_BLOCK, _LAYER = r"vision_model\.vision_tower\.blocks\.(\d+)\.", r"vision_model.encoder.layers.\1."
_NAMES: Rules = (
    (_BLOCK + r"attn\.qkv", _LAYER + "self_attn.[q|k|v]_proj"),
    (_BLOCK + r"attn\.proj", _LAYER + "self_attn.projection_layer"),
    (_BLOCK + r"attn\.", _LAYER + "self_attn."),
    (_BLOCK + r"norm(\d)", _LAYER + r"layer_norm\2"),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
    (
        r"vision_model\.vision_tower\.pos_embed$",
        "vision_model.embeddings.position_embedding.weight",
    ),
    (
        r"vision_model\.vision_tower\.patch_embed\.proj\.",
        "vision_model.embeddings.patch_embedding.",
    ),
    (r"vision_model\.vision_tower\.norm\.", "vision_model.post_layernorm."),
    (r"aligner\.layers\.0\.", "aligner.fc1."),
    (r"aligner\.layers\.2\.", "aligner.hidden_layers.0."),
)
_SIZES = {"width": 1024, "layers": 24, "heads": 16, "patch_size": 16, "mlp_ratio": 4}


def _encoder(raw: Raw) -> dict[str, Any]:
    """``params`` of the vision encoder with its class's defaults; ValueError for another one."""
    params = raw["vision_config"]["params"]
    name = params.get("model_name", "siglip_large_patch16_384")
    if name != "siglip_large_patch16_384":
        raise ValueError(f"the encoder {name!r} is not supported")
    return {**_SIZES, "image_size": 384, **params}


def _config(raw: Raw) -> dict[str, Any]:
    """The part that generates images is as small as the class allows."""
    encoder, aligner = _encoder(raw), raw["aligner_config"]["params"]
    depth = int(aligner.get("depth", 1))
    if aligner.get("projector_type", "mlp_gelu") != "mlp_gelu" or depth != 2:
        raise ValueError("only an aligner of two layers is supported")
    maker = {"embed_dim": 2, "num_embeddings": 2, "latent_channels": 2, "base_channels": 32}
    small = {"channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 2}
    return {
        "model_type": "janus",
        "text_config": stub(int(aligner["n_embed"])),
        "vq_config": {**maker, **small, "image_token_embed_dim": 2, "num_hidden_layers": 1},
        "vision_config": {
            "hidden_size": encoder["width"],
            "num_hidden_layers": encoder["layers"],
            "num_attention_heads": encoder["heads"],
            "mlp_ratio": encoder["mlp_ratio"],
            "image_size": encoder["image_size"],
            "patch_size": encoder["patch_size"],
            "num_image_tokens": _num_image_tokens(encoder),
            "projection_dim": int(aligner["n_embed"]),
            "depth": depth,
        },
    }


def _num_image_tokens(encoder: Mapping[str, Any]) -> int:
    return (int(encoder["image_size"]) // int(encoder["patch_size"])) ** 2


def _image_options(raw: Raw) -> dict[str, Any]:
    side, half = _encoder(raw)["image_size"], [0.5, 0.5, 0.5]
    size = {"height": side, "width": side}
    return {"size": size, "image_mean": half, "image_std": half, "min_size": 14}


_TOKENS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}

LAYOUT = CheckpointLayout(
    _config,
    _NAMES,
    unused=r"generation_|vqmodel\.",
    processor="JanusProcessor",
    image_processor="Janus",
    options=lambda raw: {"num_image_tokens": _num_image_tokens(_encoder(raw))},
    image_options=_image_options,
    tokens=_TOKENS,
)
