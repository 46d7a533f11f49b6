"""Molmo, whose config says nothing of its encoder; that is ``models/encoders/molmo.py``'s."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_NAMES: Rules = (
    (r"model\.vision_backbone\.(image_vit|image_pooling_2d|image_projector|pad_embed)", r"\1"),
)
# OpenAI's CLIP ViT-L/14 for 336 pixels without its last layers, in all published checkpoints
ENCODER: dict[str, Any] = {
    "side": 336,
    "patch": 14,
    "width": 1024,
    "heads": 16,
    "inner": 4096,
    "layers": (15, 22),  # whose outputs are read, the later one first
    "eps": 1e-5,
}


def _config(raw: Raw) -> dict[str, Any]:
    sizes = {"hidden_size": int(raw["hidden_size"])}
    return {**ENCODER, **sizes, "projector_inner": int(raw["intermediate_size"]) // 2}


LAYOUT = CheckpointLayout(_config, _NAMES)
