"""Keye-VL and Keye-VL 1.5: the encoder of PaddleOCR-VL beside Qwen 3, whose keys are at the top of
config.json."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub, with_pixels
from radixlm.base.record import replace

_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_channels", "image_size", "patch_size", "hidden_act", "layer_norm_eps"),
    "spatial_merge_size",
)
_PIXELS = (
    *("patch_size", "merge_size", "min_pixels", "max_pixels", "image_mean", "image_std"),
    *("do_resize", "resample"),
)
_DEFAULTS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
_NAMES: Rules = (
    (r"visual\.vision_model\.(?!head\.)", "visual.vision_model."),
    (r"mlp_AR\.", "projector."),
)
_NAMES_1_5: Rules = (
    (r"mlp_AR\.pre_norm\.", "projector.linear_1.0."),
    (r"mlp_AR\.linear_1\.", "projector.linear_1.1."),
    *_NAMES,
)


def text_model_type(raw: Raw) -> str:
    """The text model is Qwen 3's."""
    return "qwen3"


def _config(raw: Raw) -> dict[str, Any]:
    vision = {key: raw["vision_config"][key] for key in _KEPT if key in raw["vision_config"]}
    text = {**stub(int(raw["hidden_size"])), "model_type": "paddleocr_vl_text"}
    return {"model_type": "paddleocr_vl", "vision_config": vision, "text_config": text}


def _config_1_5(raw: Raw) -> dict[str, Any]:
    return {**_config(raw), "has_merged_norm": True}


def _image_options(raw: Raw) -> dict[str, Any]:
    return {**_DEFAULTS, **{key: raw["pixels"][key] for key in _PIXELS if key in raw["pixels"]}}


KEYE = CheckpointLayout(
    _config,
    _NAMES,
    completed=with_pixels,
    processor="PaddleOCRVLProcessor",
    image_processor="PaddleOCRVL",
    image_options=_image_options,
    tokens={"image_token": "<|image_pad|>"},
)
KEYE_1_5 = replace(KEYE, config=_config_1_5, names=_NAMES_1_5)
