"""dots.ocr and dots.vlm1: an encoder of their own (``models/encoders/custom.py``) beside Qwen 2
and DeepSeek V3."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, with_pixels

_NAMES: Rules = ((r"vision_tower\.", "vision_tower."),)
_ENCODER = {
    "embed_dim": 1536,
    "intermediate_size": 4224,
    "num_hidden_layers": 42,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "post_norm": True,
}
_IMAGE_KEYS = (
    *("min_pixels", "max_pixels", "size", "patch_size", "temporal_patch_size", "merge_size"),
    *("image_mean", "image_std", "do_resize", "resample"),
)


def _config(raw: Raw) -> dict[str, Any]:
    given = raw["vision_config"]
    vision = {key: given.get(key, value) for key, value in _ENCODER.items()}
    return {"vision_config": vision, "hidden_size": int(raw["hidden_size"])}


def _image_options(raw: Raw) -> dict[str, Any]:
    given, encoder = raw["pixels"], _config(raw)["vision_config"]
    own = {
        "patch_size": encoder["patch_size"],
        "temporal_patch_size": encoder["temporal_patch_size"],
        "merge_size": encoder["spatial_merge_size"],
    }
    return {**own, **{key: given[key] for key in _IMAGE_KEYS if key in given}}


LAYOUT = CheckpointLayout(
    _config,
    _NAMES,
    completed=with_pixels,
    processor="Qwen2_5_VLProcessor",
    image_processor="Qwen2VL",
    image_options=_image_options,
    tokens={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
)
