"""DeepSeek-OCR as published: its encoders, SAM below CLIP, are those of Unlimited-OCR's class."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.media_layouts import Original, Raw, Rules, stub

# who may say that its text model is DeepSeek V2 without latent attention
DEEPSEEK_OCRS = ("DeepseekOCRForCausalLM",)
_BLOCK, _LAYER = r"model\.sam_model\.blocks\.(\d+)\.", r"vision_tower.sam_encoder.layers.\1."
_SAM, _EYE = "vision_tower.sam_encoder.", "vision_tower.vision_encoder."
_NAMES: Rules = (
    (_BLOCK + r"norm(\d)\.", _LAYER + r"layer_norm\2."),
    (_BLOCK, _LAYER),
    (r"model\.sam_model\.patch_embed\.proj\.", _SAM + "patch_embed.projection."),
    (r"model\.sam_model\.neck\.0\.", _SAM + "neck.conv1."),
    (r"model\.sam_model\.neck\.1\.", _SAM + "neck.layer_norm1."),
    (r"model\.sam_model\.neck\.2\.", _SAM + "neck.conv2."),
    (r"model\.sam_model\.neck\.3\.", _SAM + "neck.layer_norm2."),
    (r"model\.sam_model\.net_2\.", _SAM + "proj.conv1."),
    (r"model\.sam_model\.net_3\.", _SAM + "proj.conv2."),
    (r"model\.sam_model\.", _SAM),
    (
        r"model\.vision_model\.transformer\.layers\.(\d+)\.self_attn\.qkv_proj",
        _EYE + r"encoder.layers.\1.self_attn.[q|k|v]_proj",
    ),
    (r"model\.vision_model\.transformer\.", _EYE + "encoder."),
    (r"model\.vision_model\.", _EYE),
    (r"model\.projector\.layers\.", "multi_modal_projector."),
    (r"model\.view_seperator", "view_separator"),
    (r"model\.image_newline", "image_newline"),
)
# what the code of the checkpoint has where its config is silent
_SAM_SIZES = {"width": 768, "layers": 12, "heads": 12, "patch_size": 16}
_CLIP_SIZES = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}


def _config(raw: Raw) -> dict[str, Any]:
    said = raw["vision_config"].get("width") or {}
    sam = {**_SAM_SIZES, **(said.get("sam_vit_b") or {})}
    clip = {**_CLIP_SIZES, **(said.get("clip-l-14-224") or {})}
    kind = (raw.get("projector_config") or {}).get("projector_type", "linear")
    if kind != "linear" or raw.get("tile_tag", "2D") != "2D":
        raise ValueError(f"projector_type {kind!r}, tile_tag {raw.get('tile_tag')!r}")
    kept = ("downsample_channels", "global_attn_indexes", "window_size", "output_channels")
    below = {
        **{key: sam[key] for key in kept if key in sam},
        "hidden_size": sam["width"],
        "num_hidden_layers": sam["layers"],
        "num_attention_heads": sam["heads"],
        "mlp_dim": int(sam["width"] * sam.get("mlp_ratio", 4)),
        "patch_size": sam["patch_size"],
        "image_size": _side(raw),
    }
    above = {
        "hidden_size": clip["width"],
        "num_hidden_layers": clip["layers"],
        "num_attention_heads": clip["heads"],
        "intermediate_size": int(clip["width"] * clip.get("mlp_ratio", 4)),
        "image_size": clip["image_size"],
        "patch_size": clip["patch_size"],
    }
    text = stub(int(raw["language_config"]["hidden_size"]))
    own = {"n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    return {
        "model_type": "unlimited_ocr",
        "vision_config": {"sam_config": below, "encoder_config": above},
        "text_config": {**text, **own, "model_type": "unlimited_ocr_text", "layer_types": []},
    }


def _side(raw: Raw) -> int:
    return int(raw["vision_config"].get("image_size", 1024))


def _options(raw: Raw) -> dict[str, Any]:
    sam = (raw["vision_config"].get("width") or {}).get("sam_vit_b") or {}
    return {"patch_size": int(sam.get("patch_size", 16)), "downsample_ratio": 4}


def _reader(raw: Raw) -> dict[str, Any]:
    """Images larger than a tile are also cut into two to nine of them."""
    side = _side(raw)
    return {
        "size": {"height": side, "width": side},
        "tile_size": side * 5 // 8,
        "min_patches": 2,
        "max_patches": 9,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


OCR_LAYOUTS = dict.fromkeys(
    DEEPSEEK_OCRS,
    Original(
        _config,
        _NAMES,
        "UnlimitedOcrProcessor",
        "UnlimitedOcr",
        _options,
        _reader,
        {"image_token": "<image>"},
        unused="language_model",
    ),
)
