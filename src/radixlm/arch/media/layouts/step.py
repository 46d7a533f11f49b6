"""Step3-VL and Step 3.7 as published: their processor comes as code."""

import math
from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout

_STRIDE = 4  # patches of a placeholder's side


def _config(raw: Raw) -> dict[str, Any]:
    """That of Step 3.7, which has the same encoder."""
    kept = ("vision_config", "projector_bias")
    return {
        "model_type": "step3p7",
        **{key: raw[key] for key in kept if key in raw},
        "text_config": {"hidden_size": int(raw["text_config"]["hidden_size"])},
    }


def text_model_type(raw: Raw) -> str:
    """The text model is Qwen 3's, whatever its config is called."""
    return "qwen3"


def _image_options(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    patch, side = int(vision.get("patch_size", 14)), int(vision.get("image_size", 728))
    crop = math.isqrt(int(raw.get("patch_token_len", 81))) * _STRIDE * patch
    return {"size": {"height": side, "width": side}, "patch_size": crop, "vision_patch_size": patch}


LAYOUT = CheckpointLayout(
    _config,
    processor="Step3p7Processor",
    image_processor="Step3p7",
    image_options=_image_options,
)
