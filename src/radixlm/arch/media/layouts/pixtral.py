"""Pixtral and Mistral Small in Mistral's own format: the layers of LLaVA, or of Mistral 3 where
patches are merged, with a Pixtral encoder."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub

_BLOCK, _LAYER = (
    r"vision_encoder\.transformer\.layers\.(\d+)\.",
    r"vision_tower.transformer.layers.\1.",
)
_NAMES: Rules = (
    (_BLOCK + r"attention\.w([qkv])\.", _LAYER + r"attention.\2_proj."),
    (_BLOCK + r"attention\.wo\.", _LAYER + "attention.o_proj."),
    (_BLOCK + r"feed_forward\.w1\.", _LAYER + "feed_forward.gate_proj."),
    (_BLOCK + r"feed_forward\.w2\.", _LAYER + "feed_forward.down_proj."),
    (_BLOCK + r"feed_forward\.w3\.", _LAYER + "feed_forward.up_proj."),
    (r"vision_encoder\.", "vision_tower."),
    (r"vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
    (r"vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
    (r"pre_mm_projector_norm\.", "multi_modal_projector.norm."),
    (r"patch_merger\.", "multi_modal_projector.patch_merger."),
)
_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_channels", "image_size", "patch_size"),
)


def _merges(raw: Raw) -> bool:
    """Whether patches are merged. ValueError for a norm without a merger, or a merger without."""
    vision = raw["vision_config"]
    merges: bool = vision.get("mm_projector_id") == "patch_merge"
    if merges != bool(vision.get("add_pre_mm_projector_layer_norm")):
        raise ValueError(
            "mm_projector_id = 'patch_merge' and add_pre_mm_projector_layer_norm must come together"
        )
    return merges


def _config(raw: Raw) -> dict[str, Any]:
    vision, text = raw["vision_config"], raw["text_config"]
    rope = {"rope_type": "default", "rope_theta": float(vision.get("rope_theta", 1e4))}
    encoder = {key: vision[key] for key in _KEPT if key in vision}
    values: dict[str, Any] = {
        "model_type": "mistral3" if _merges(raw) else "llava",
        "vision_config": {"model_type": "pixtral", **encoder, "rope_parameters": rope},
        "text_config": stub(int(text["hidden_size"])),
        "vision_feature_layer": -1,
        "multimodal_projector_bias": bool(vision.get("adapter_bias", True)),
    }
    if _merges(raw):
        values["text_config"]["rms_norm_eps"] = 1e-5  # of the norm before the merger
        return values | {"spatial_merge_size": int(vision.get("spatial_merge_size") or 2)}
    return values | {"vision_feature_select_strategy": "full"}


def _options(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    merge = int(vision.get("spatial_merge_size") or 1) if _merges(raw) else 1
    return {"patch_size": int(vision["patch_size"]), "spatial_merge_size": merge}


def _image_options(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    patch = int(vision["patch_size"])
    longest = int(vision.get("max_image_size") or vision["image_size"])
    return {"patch_size": {"height": patch, "width": patch}, "size": {"longest_edge": longest}}


LAYOUT = CheckpointLayout(
    _config,
    _NAMES,
    paired=r"vision_tower\.transformer\.layers\.\d+\.attention\.[qk]_proj\.",
    processor="PixtralProcessor",
    image_processor="Pixtral",
    options=_options,
    image_options=_image_options,
    tokens={
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
)
