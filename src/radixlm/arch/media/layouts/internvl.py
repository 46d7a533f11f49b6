"""InternVL as its authors publish it, and models with its layers or its projector: Intern-S1,
NVLM-D, H2OVL and Eagle 2.5."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub, with_pixels
from radixlm.base.record import replace

_BLOCK, _LAYER = r"vision_model\.encoder\.layers\.(\d+)\.", r"vision_tower.encoder.layer.\1."
_PROJECTOR: Rules = (
    (r"mlp1\.0", "multi_modal_projector.layer_norm"),
    (r"mlp1\.1", "multi_modal_projector.linear_1"),
    (r"mlp1\.3", "multi_modal_projector.linear_2"),
)
_INTERNVL: Rules = (
    (r"vision_model\.embeddings\.class_embedding", "vision_tower.embeddings.cls_token"),
    (
        r"vision_model\.embeddings\.position_embedding",
        "vision_tower.embeddings.position_embeddings",
    ),
    (
        r"vision_model\.embeddings\.patch_embedding",
        "vision_tower.embeddings.patch_embeddings.projection",
    ),
    (_BLOCK + r"attn\.qkv", _LAYER + "attention.[q|k|v]_proj"),
    (_BLOCK + r"attn\.proj", _LAYER + "attention.projection_layer"),
    (_BLOCK + r"attn\.", _LAYER + "attention."),
    (_BLOCK + "norm1", _LAYER + "layernorm_before"),
    (_BLOCK + "norm2", _LAYER + "layernorm_after"),
    (_BLOCK + "ls1", _LAYER + "lambda_1"),
    (_BLOCK + "ls2", _LAYER + "lambda_2"),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
    *_PROJECTOR,
)


def _internvl(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    llm = raw.get("llm_config") or raw.get("text_config") or {}
    kept = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "norm_type", "layer_norm_eps", "num_channels"),
    )
    encoder = {key: vision[key] for key in kept if key in vision}
    size, patch = vision.get("image_size", 448), vision.get("patch_size", 14)
    return {
        "model_type": "internvl",
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "vision_feature_layer": raw.get("select_layer", -1),
        "text_config": stub(int(llm["hidden_size"])),
        "vision_config": {
            **encoder,
            "image_size": [size, size],
            "patch_size": [patch, patch],
            "attention_bias": vision.get("qkv_bias", False),
            "use_qk_norm": vision.get("qk_normalization", False),
            "use_mask_token": False,
        },
    }


def _side(raw: Raw) -> int:
    return int(raw.get("force_image_size") or raw["vision_config"].get("image_size", 448))


def _internvl_options(raw: Raw) -> dict[str, Any]:
    side = _side(raw) // int(raw["vision_config"].get("patch_size", 14))
    return {"image_seq_length": int(side**2 * raw.get("downsample_ratio", 0.5) ** 2)}


def _internvl_image_options(raw: Raw) -> dict[str, Any]:
    return {
        "size": {"height": _side(raw), "width": _side(raw)},
        "crop_to_patches": bool(raw.get("dynamic_image_size", True)),
        "min_patches": int(raw.get("min_dynamic_patch", 1)),
        "max_patches": int(raw.get("max_dynamic_patch", 12)),
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

INTERNVL = CheckpointLayout(
    _internvl,
    _INTERNVL,
    processor="InternVLProcessor",
    image_processor="GotOcr2",
    options=_internvl_options,
    image_options=_internvl_image_options,
    tokens=_TOKENS,
)

# ---- NVLM-D and Eagle 2.5 -----------------------------------------------------------------------


def _nvlm(raw: Raw) -> dict[str, Any]:
    """The projector is as wide as the text model's feed-forward layers and has no biases."""
    llm = raw.get("llm_config") or raw["text_config"]
    return {
        **_internvl(raw),
        "projector_shape": {"inner": int(llm["intermediate_size"]), "bias": False},
    }


def _eagle(raw: Raw) -> dict[str, Any]:
    """SigLIP in place of InternVL's encoder."""
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False}
    return {
        "model_type": "internvl",
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "vision_feature_layer": raw.get("select_layer", -1),
        "vision_feature_select_strategy": "full",
        "text_config": stub(int(raw["text_config"]["hidden_size"])),
        "vision_config": {**raw["vision_config"], **vision},
    }


def _eagle_image_options(raw: Raw) -> dict[str, Any]:
    half = [0.5, 0.5, 0.5]
    means = {key: raw["pixels"].get(key) or half for key in ("image_mean", "image_std")}
    return {**_internvl_image_options(raw), **means}


NVLM = replace(INTERNVL, config=_nvlm)
EAGLE = replace(
    INTERNVL,
    config=_eagle,
    names=(
        (
            r"vision_model\.(?:vision_model\.)?((?:embeddings|encoder|post_layernorm)\.)",
            r"vision_tower.\1",
        ),
        *_PROJECTOR,
    ),
    unused=r"vision_tower\.head\.",
    completed=with_pixels,
    image_options=_eagle_image_options,
)

# ---- Intern-S1 ----------------------------------------------------------------------------------

_INTERN_S1: Rules = ((r"model\.((?:vision_tower|multi_modal_projector)\.)", r"\1"),)
_INTERN_S1_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "norm_type", "layer_norm_eps", "num_channels", "attention_bias"),
    *("use_qk_norm", "use_mean_pooling", "use_absolute_position_embeddings"),
    "layer_scale_init_value",
)


def _intern_s1(raw: Raw) -> dict[str, Any]:
    """The layers and names of InternVL as transformers has it."""
    vision = raw["vision_config"]
    encoder = {key: vision[key] for key in _INTERN_S1_KEYS if key in vision}
    sides = {key: _pair(vision[key]) for key in ("image_size", "patch_size")}
    kept = ("downsample_ratio", "projector_hidden_act", "vision_feature_layer")
    return {
        "model_type": "internvl",
        **{key: raw[key] for key in kept if key in raw},
        "text_config": stub(int(raw["text_config"]["hidden_size"])),
        "vision_config": {**encoder, **sides, "use_mask_token": False},
    }


def _pair(value: Any) -> list[int]:
    return [int(one) for one in value] if isinstance(value, list) else [int(value)] * 2


def _intern_s1_options(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    side = _pair(vision["image_size"])[0] // _pair(vision["patch_size"])[0]
    return {"image_seq_length": int(side**2 * raw.get("downsample_ratio", 0.5) ** 2)}


def _intern_s1_image_options(raw: Raw) -> dict[str, Any]:
    height, width = _pair(raw["vision_config"]["image_size"])
    return {
        "size": {"height": height, "width": width},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


INTERN_S1 = CheckpointLayout(
    _intern_s1,
    _INTERN_S1,
    processor="InternVLProcessor",
    image_processor="GotOcr2",
    options=_intern_s1_options,
    image_options=_intern_s1_image_options,
    tokens=_TOKENS,
)
