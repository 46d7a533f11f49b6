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
_SAM_NAMES: Rules = (
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
    (r"model\.projector\.layers\.", "multi_modal_projector."),
    (r"model\.view_seperator", "view_separator"),
)
_OCR: Rules = (
    *_SAM_NAMES,
    (
        r"model\.vision_model\.transformer\.layers\.(\d+)\.self_attn\.qkv_proj",
        _EYE + r"encoder.layers.\1.self_attn.[q|k|v]_proj",
    ),
    (r"model\.vision_model\.transformer\.", _EYE + "encoder."),
    (r"model\.vision_model\.", _EYE),
    (r"model\.image_newline", "image_newline"),
)
_OCR2: Rules = (
    *_SAM_NAMES,
    (r"model\.qwen2_model\.model\.model\.", _EYE),
    (r"model\.qwen2_model\.query_(768|1024)\.", r"vision_tower.query_\1_resolution."),
)
# defaults in the code of the checkpoint
_SAM_SIZES = {"width": 768, "layers": 12, "heads": 12, "patch_size": 16}
_CLIP_SIZES = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}
_QWEN_SIZES = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}


def _ocr(raw: Raw) -> dict[str, Any]:
    clip = {**_CLIP_SIZES, **(_widths(raw).get("clip-l-14-224") or {})}
    above = {
        "hidden_size": clip["width"],
        "num_hidden_layers": clip["layers"],
        "num_attention_heads": clip["heads"],
        "intermediate_size": int(clip["width"] * clip.get("mlp_ratio", 4)),
        "image_size": clip["image_size"],
        "patch_size": clip["patch_size"],
    }
    return _ocr_config(raw, "unlimited_ocr", above, layer_types=[])


def _ocr2(raw: Raw) -> dict[str, Any]:
    given = _widths(raw).get("qwen2-0-5b") or {}
    sizes = {**_QWEN_SIZES, **{key: given[key] for key in _QWEN_SIZES if key in given}}
    above = {
        **sizes,
        "hidden_size": int(given.get("dim", sizes["hidden_size"])),
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "vocab_size": 1,  # its tokens are learned queries
    }
    return _ocr_config(raw, "deepseek_ocr2", above)


def _ocr_config(raw: Raw, model_type: str, above: dict[str, Any], **text: Any) -> dict[str, Any]:
    """The config of the class; ``above``: of the encoder that reads SAM's patches."""
    sam = {**_SAM_SIZES, **(_widths(raw).get("sam_vit_b") or {})}
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
    experts = {"n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    width = stub(int(raw["language_config"]["hidden_size"]))
    return {
        "model_type": model_type,
        "vision_config": {"sam_config": below, "encoder_config": above},
        "text_config": {**width, **experts, "model_type": f"{model_type}_text", **text},
    }


def _widths(raw: Raw) -> dict[str, Any]:
    return raw["vision_config"].get("width") or {}


def _side(raw: Raw) -> int:
    return int(raw["vision_config"].get("image_size", 1024))


def _ocr_options(raw: Raw) -> dict[str, Any]:
    sam = _widths(raw).get("sam_vit_b") or {}
    return {"patch_size": int(sam.get("patch_size", 16)), "downsample_ratio": 4}


def _ocr_image_options(raw: Raw) -> dict[str, Any]:
    """Images larger than a tile are cut into two to nine tiles as well."""
    return _tiles(raw, 5 / 8, 9)


def _ocr2_image_options(raw: Raw) -> dict[str, Any]:
    """As DeepSeek-OCR's, in up to six larger tiles."""
    return _tiles(raw, 3 / 4, 6)


def _tiles(raw: Raw, share: float, max_tiles: int) -> dict[str, Any]:
    """``share``: of a side of the whole image that a tile's side has."""
    side = _side(raw)
    return {
        "size": {"height": side, "width": side},
        "tile_size": int(side * share),
        "min_patches": 2,
        "max_patches": max_tiles,
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
OCR2 = CheckpointLayout(
    _ocr2,
    _OCR2,
    unused="language_model",
    processor="DeepseekOcr2Processor",
    image_processor="DeepseekOcr2",
    options=_ocr_options,
    image_options=_ocr2_image_options,
    tokens={"image_token": "<image>"},
)
