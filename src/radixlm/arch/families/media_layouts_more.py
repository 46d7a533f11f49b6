"""Checkpoints with encoders that no class of transformers has as a whole: the modules are in
``models/custom_encoders.py``, their processors in ``multimodal/image_processors.py``."""

from __future__ import annotations

from typing import Any, Literal

from radixlm.arch.families.media_layouts import Original, Raw, Rules
from radixlm.arch.families.media_layouts_ocr import DEEPSEEK_OCRS
from radixlm.base.record import Record

# version of a MiniCPM-V or -o -> the family of its text model
_MINICPM_TEXTS = {"2.6": "qwen2", "4.0": "llama", "4": "llama", "4.5": "qwen3"}
# some folders do not say which they are
DEEPSEEKS = ("DeepseekVL2ForCausalLM", "DeepseekVLV2ForCausalLM")
VILAS = ("VILAForConditionalGeneration", "NVILALiteForConditionalGeneration")
_OF_TYPE = {"deepseek_vl_v2": DEEPSEEKS[0], "vila": VILAS[0], "nvila_lite": VILAS[1]}
_MINICPM: Rules = ((r"(vpm|resampler)\.", r"\1."),)
_SIGLIP_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size", "num_channels", "hidden_act", "layer_norm_eps"),
)
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}


def _minicpm(raw: Raw) -> dict[str, Any]:
    """Of a MiniCPM-V or -o from 2.6 to 4.5."""
    said = raw.get("vision_config") or {}
    encoder = {**_SIGLIP, **{key: said[key] for key in _SIGLIP_KEYS if key in said}}
    if raw.get("drop_vision_last_layer", True):
        encoder["num_hidden_layers"] -= 1
    return {
        "vision_config": encoder,
        "hidden_size": int(raw["hidden_size"]),
        "num_queries": int(raw.get("query_num", 64)),
    }


_BLOCK, _LAYER = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."
_KIMI: Rules = (
    (
        r"vision_tower\.patch_embed\.pos_emb\.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
    ),
    (r"vision_tower\.patch_embed\.", "vision_tower.patch_embed."),
    (r"vision_tower\.encoder\.final_layernorm\.", "vision_tower.final_layernorm."),
    (_BLOCK + "norm0", _LAYER + "norm1"),
    (_BLOCK + "norm1", _LAYER + "norm2"),
    (_BLOCK + r"mlp\.fc0", _LAYER + "mlp.fc1"),
    (_BLOCK + r"mlp\.fc1", _LAYER + "mlp.fc2"),
    (_BLOCK + "wqkv", _LAYER + "attn.[q|k|v]_proj"),
    (_BLOCK + "wo", _LAYER + "attn.proj"),
    (r"multi_modal_projector\.pre_norm", "mm_projector.pre_norm"),
    (r"multi_modal_projector\.linear_1", "mm_projector.in_proj"),
    (r"multi_modal_projector\.linear_2", "mm_projector.out_proj"),
)


def _kimi(raw: Raw) -> dict[str, Any]:
    """Of Kimi-VL, whose encoder is Kimi K2.5's without frames."""
    said = raw["vision_config"]
    kept = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("patch_size", "merge_kernel_size"),
    )
    encoder = {key: said[key] for key in kept if key in said}
    encoder["pos_emb_height"] = said.get("init_pos_emb_height", 64)
    encoder["pos_emb_width"] = said.get("init_pos_emb_width", 64)
    return {
        "vision_config": encoder,
        "hidden_size": int(raw["text_config"]["hidden_size"]),
        "projection_hidden_size": said.get("hidden_size", 1152),
    }


_TIMM = r"vision\.blocks\.(\d+)\."
_OURS = r"vision.encoder.layers.\1."
_DEEPSEEK: Rules = (
    (r"vision\.patch_embed\.proj\.", "vision.embedding."),
    (r"vision\.(pos_embed|norm)", r"vision.\1"),
    (_TIMM + "norm1", _OURS + "layer_norm1"),
    (_TIMM + "norm2", _OURS + "layer_norm2"),
    (_TIMM + r"attn\.qkv", _OURS + "self_attn.[q|k|v]_proj"),
    (_TIMM + r"attn\.proj", _OURS + "self_attn.out_proj"),
    (_TIMM + r"mlp\.", _OURS + "mlp."),
    (r"projector\.layers\.", "projector."),
    (r"(image_newline|view_seperator)", r"\1"),
)
# of the encoders that go by a name; what the config says besides wins
_NAMED_TOWERS = {"siglip_so400m_patch14_384": {"image_size": 384, "heads": 16}}


def _deepseek(raw: Raw) -> dict[str, Any]:
    """Of DeepSeek-VL2. ValueError for the ways of joining that no published one has."""
    eye, hand = raw["vision_config"], raw.get("projector_config") or {}
    kind = hand.get("projector_type", "downsample_mlp_gelu")
    if kind != "downsample_mlp_gelu" or raw.get("tile_tag", "2D") != "2D":
        raise ValueError(f"projector_type {kind!r}, tile_tag {raw.get('tile_tag')!r}")
    default = _NAMED_TOWERS.get(str(eye.get("model_name", "siglip_so400m_patch14_384")), {})
    eye = {"width": 1152, "layers": 27, "patch_size": 14, "mlp_ratio": 3.7362, **default, **eye}
    dim = int(raw["language_config"]["hidden_size"])
    encoder = {
        "hidden_size": eye["width"],
        "intermediate_size": int(eye["width"] * eye["mlp_ratio"]),
        "num_hidden_layers": eye["layers"],
        "num_attention_heads": eye["heads"],
        "image_size": eye["image_size"],
        "patch_size": eye["patch_size"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }
    return {
        "vision_config": encoder,
        "hidden_size": dim,
        "inner": int(dim * hand.get("mlp_ratio", 1)),
        "depth": int(hand.get("depth", 2)),
        "merge": int(hand.get("downsample_ratio", 2)),
        "is_whole_first": raw.get("global_view_pos", "head") == "head",
    }


_SIGLIP_PARTS = r"((?:embeddings|encoder)\.)"
_VILA: Rules = (
    (rf"(?:vision_tower\.)+(?:vision_model\.)?{_SIGLIP_PARTS}", r"vision_tower.\1"),
    (r"mm_projector\.layers\.", "projector."),
)
# kind of projector -> so many rows and columns of patches make a place
_VILA_MERGES = {"mlp_downsample_3x3_fix": 3, "mlp_downsample_2x2_fix": 2}


def vila_merge(raw: Raw) -> int:
    """Rows and columns of patches that make a place. ValueError for another projector."""
    kind = str(raw.get("mm_projector_type") or "mlp_downsample_3x3_fix")
    if kind not in _VILA_MERGES or raw.get("mm_vision_select_feature", "cls_patch") != "cls_patch":
        select = raw.get("mm_vision_select_feature")
        raise ValueError(f"mm_projector_type {kind!r}, mm_vision_select_feature {select!r}")
    return _VILA_MERGES[kind]


def _vila(raw: Raw) -> dict[str, Any]:
    """Of VILA and NVILA-Lite. The encoder's last layers, those behind the one that is read, are
    left
    away."""
    eye = {**_VILA_TOWER, **{k: v for k, v in raw["vision_config"].items() if k in _SIGLIP_KEYS}}
    behind = -1 - int(raw.get("mm_vision_select_layer", -2))
    if not 0 <= behind < eye["num_hidden_layers"]:
        raise ValueError(f"mm_vision_select_layer {raw.get('mm_vision_select_layer')!r}")
    eye["num_hidden_layers"] -= behind
    dim = raw.get("hidden_size") or raw["text_config"]["hidden_size"]
    return {"vision_config": eye, "hidden_size": int(dim), "merge": vila_merge(raw)}


_VILA_TOWER = {**_SIGLIP, "image_size": 448, "num_channels": 3}


class Built(Record):
    """``kind``: the name of the module and of the processor; ``layout``: what they are made of."""

    kind: Literal["minicpm", "kimi", "deepseek", "vila"]
    layout: Original


BUILT: dict[str, Built] = {
    "MiniCPMV": Built("minicpm", Original(_minicpm, _MINICPM)),
    "MiniCPMO": Built("minicpm", Original(_minicpm, _MINICPM)),
    "KimiVLForConditionalGeneration": Built("kimi", Original(_kimi, _KIMI)),
    **dict.fromkeys(DEEPSEEKS, Built("deepseek", Original(_deepseek, _DEEPSEEK))),
    **dict.fromkeys(VILAS, Built("vila", Original(_vila, _VILA))),
}


def architecture_of(raw: Raw) -> str:
    """What a config.json says of itself; "" if nothing."""
    listed = raw.get("architectures") or [_OF_TYPE.get(str(raw.get("model_type")), "")]
    return str(listed[0])


def text_type(architecture: str, raw: Raw) -> str:
    """The family of a text model that has another name or none; "" if it is what it says."""
    if architecture in ("MiniCPMV", "MiniCPMO"):
        return _MINICPM_TEXTS.get(str(raw.get("version", "")), "")
    if architecture in DEEPSEEK_OCRS:
        return "deepseek_ocr2_text"
    if architecture in DEEPSEEKS and not raw.get("use_mla", True):
        return "deepseek"
    if architecture in DEEPSEEKS and raw.get("topk_method") == "noaux_tc":
        return "deepseek_v2_noaux"
    return ""
