"""DeepSeek-VL2, whose encoder is ``models/encoders/custom.py``'s, and DeepSeek-OCR as published,
whose encoders, SAM below CLIP, are those of Unlimited-OCR in transformers."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub

_TIMM = r"vision\.blocks\.(\d+)\."
_ENCODER_LAYER = r"vision.encoder.layers.\1."
_VL2: Rules = (
    (r"vision\.patch_embed\.proj\.", "vision.embedding."),
    (r"vision\.(pos_embed|norm)", r"vision.\1"),
    (_TIMM + "norm1", _ENCODER_LAYER + "layer_norm1"),
    (_TIMM + "norm2", _ENCODER_LAYER + "layer_norm2"),
    (_TIMM + r"attn\.qkv", _ENCODER_LAYER + "self_attn.[q|k|v]_proj"),
    (_TIMM + r"attn\.proj", _ENCODER_LAYER + "self_attn.out_proj"),
    (_TIMM + r"mlp\.", _ENCODER_LAYER + "mlp."),
    (r"projector\.layers\.", "projector."),
    (r"(image_newline|view_seperator)", r"\1"),
)
# sizes of encoders that a config names; its other keys win
_NAMED_ENCODERS = {"siglip_so400m_patch14_384": {"image_size": 384, "heads": 16}}


def _vl2(raw: Raw) -> dict[str, Any]:
    """DeepSeek-VL2's. ValueError for projectors and tile layouts that no published model has."""
    vision, projector = raw["vision_config"], raw.get("projector_config") or {}
    kind = projector.get("projector_type", "downsample_mlp_gelu")
    if kind != "downsample_mlp_gelu" or raw.get("tile_tag", "2D") != "2D":
        raise ValueError(f"projector_type {kind!r}, tile_tag {raw.get('tile_tag')!r}")
    default = _NAMED_ENCODERS.get(str(vision.get("model_name", "siglip_so400m_patch14_384")), {})
    vision = {
        "width": 1152,
        "layers": 27,
        "patch_size": 14,
        "mlp_ratio": 3.7362,
        **default,
        **vision,
    }
    dim = int(raw["language_config"]["hidden_size"])
    encoder = {
        "hidden_size": vision["width"],
        "intermediate_size": int(vision["width"] * vision["mlp_ratio"]),
        "num_hidden_layers": vision["layers"],
        "num_attention_heads": vision["heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }
    return {
        "vision_config": encoder,
        "hidden_size": dim,
        "inner": int(dim * projector.get("mlp_ratio", 1)),
        "depth": int(projector.get("depth", 2)),
        "merge": int(projector.get("downsample_ratio", 2)),
        "is_whole_first": raw.get("global_view_pos", "head") == "head",
    }


def vl2_text_model_type(raw: Raw) -> str:
    """DeepSeek V1's for small models without latent attention, V3's with its way of routing."""
    if not raw.get("use_mla", True):
        return "deepseek"
    return "deepseek_v2_noaux" if raw.get("topk_method") == "noaux_tc" else ""


VL2 = CheckpointLayout(_vl2, _VL2)

# ---- DeepSeek-OCR -------------------------------------------------------------------------------

_BLOCK, _LAYER = r"model\.sam_model\.blocks\.(\d+)\.", r"vision_tower.sam_encoder.layers.\1."
_SAM, _EYE = "vision_tower.sam_encoder.", "vision_tower.vision_encoder."
_OCR: Rules = (
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
# defaults in the code of the checkpoint
_SAM_SIZES = {"width": 768, "layers": 12, "heads": 12, "patch_size": 16}
_CLIP_SIZES = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}


def _ocr(raw: Raw) -> dict[str, Any]:
    widths = raw["vision_config"].get("width") or {}
    sam = {**_SAM_SIZES, **(widths.get("sam_vit_b") or {})}
    clip = {**_CLIP_SIZES, **(widths.get("clip-l-14-224") or {})}
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
    experts = {"n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    return {
        "model_type": "unlimited_ocr",
        "vision_config": {"sam_config": below, "encoder_config": above},
        "text_config": {**text, **experts, "model_type": "unlimited_ocr_text", "layer_types": []},
    }


def _side(raw: Raw) -> int:
    return int(raw["vision_config"].get("image_size", 1024))


def _ocr_options(raw: Raw) -> dict[str, Any]:
    sam = (raw["vision_config"].get("width") or {}).get("sam_vit_b") or {}
    return {"patch_size": int(sam.get("patch_size", 16)), "downsample_ratio": 4}


def _ocr_image_options(raw: Raw) -> dict[str, Any]:
    """Images larger than a tile are cut into two to nine tiles as well."""
    side = _side(raw)
    return {
        "size": {"height": side, "width": side},
        "tile_size": side * 5 // 8,
        "min_patches": 2,
        "max_patches": 9,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def ocr_text_model_type(raw: Raw) -> str:
    """DeepSeek V2 without latent attention; configs may name it deepseek_v2."""
    return "deepseek_ocr2_text"


OCR = CheckpointLayout(
    _ocr,
    _OCR,
    unused="language_model",
    processor="UnlimitedOcrProcessor",
    image_processor="UnlimitedOcr",
    options=_ocr_options,
    image_options=_ocr_image_options,
    tokens={"image_token": "<image>"},
)
