"""LLaVA as its authors publish it, Intern-S1 and Janus-Pro: further rows beside those of
``media_layouts.py``. LLaVA's config has its text model's keys at the top and names its encoder,
whose
sizes and often whose weights are in another folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.media_layouts import (
    _INTERNVL_TOKENS,
    ORIGINALS,
    Original,
    Raw,
    Rules,
    stub,
)
from radixlm.arch.families.media_layouts_audio import AUDIO_LAYOUTS
from radixlm.arch.families.media_layouts_ocr import OCR_LAYOUTS
from radixlm.arch.json_file import read_object
from radixlm.arch.registry import find
from radixlm.arch.spec import Decoder
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace

# ---- LLaVA 1.5, 1.6 and OneVision ---------------------------------------------------------------

# architecture -> that of its text model
LLAVA_TEXTS = {
    "LlavaLlamaForCausalLM": "LlamaForCausalLM",
    "LlavaQwenForCausalLM": "Qwen2ForCausalLM",
    "LlavaMistralForCausalLM": "MistralForCausalLM",
    "YiVLForCausalLM": "LlamaForCausalLM",
    "LlavaVidForCausalLM": "LlamaForCausalLM",
}
# which of them watch videos, whose tokens their configs do not name
WATCHING = ("LlavaVidForCausalLM",)
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 768,
}
# the encoders that were used, for a checkpoint that has their weights and not their folder
_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip-vit-large-patch14": {**_CLIP, "image_size": 224},
    "clip-vit-large-patch14-336": {**_CLIP, "image_size": 336},
    "siglip-so400m-patch14-384": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 384,
    },
}
_TOWER_PARTS = r"((?:embeddings|pre_layrnorm|encoder|post_layernorm)\.)"
_LLAVA: Rules = (
    (
        rf"(?:model\.vision_tower\.vision_tower\.)?(?:vision_model\.)?{_TOWER_PARTS}",
        r"vision_tower.\1",
    ),
    (r"model\.(?:vision_resampler\.)?mm_projector\.0\.", "multi_modal_projector.linear_1."),
    (r"model\.(?:vision_resampler\.)?mm_projector\.2\.", "multi_modal_projector.linear_2."),
    (r"model\.mm_projector\.1\.", "multi_modal_projector.act.0."),  # where norms follow both
    (r"model\.mm_projector\.3\.", "multi_modal_projector.linear_2.0."),
    (r"model\.mm_projector\.4\.", "multi_modal_projector.linear_2.1."),
    (r"model\.image_newline", "image_newline"),
)


def llava(c: Config) -> Decoder:
    """The text model's record: its keys are at the top of the config."""
    return find(LLAVA_TEXTS[c.architecture])(c)


def vision_encoder_folder(raw: Raw, folder: Path) -> Path | None:
    """The folder that ``mm_vision_tower`` names, inside the checkpoint's or beside it, by its whole
    name or the last part of it; None if there is none."""
    name = str(raw.get("mm_vision_tower") or "")
    last = name.rstrip("/").rpartition("/")[2]
    if not last or ".." in name.split("/"):
        return None
    places = [base / one for base in (folder, folder.parent) for one in (name, last)]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _weights_beside(raw: Raw, folder: Path) -> Path | None:
    """``vision_encoder_folder`` where it holds more than the sizes."""
    beside = vision_encoder_folder(raw, folder)
    kinds = ("*.safetensors", "*.bin")
    return beside if beside is not None and any(any(beside.glob(k)) for k in kinds) else None


def _with_tower(raw: Raw, folder: Path) -> Raw:
    """The config with the sizes of the encoder that it names under ``vision_config``.
    CheckpointError
    if they are not known."""
    name = str(raw.get("mm_vision_tower") or "")
    beside = vision_encoder_folder(raw, folder)
    sizes = _TOWERS.get(name.rpartition("/")[2])
    if beside is not None:
        sizes = read_object(beside / "config.json")
        sizes = sizes.get("vision_config", sizes)
    if sizes is None:
        message = (
            f"mm_vision_tower = {name!r}: put the folder of that encoder beside the checkpoint"
        )
        raise CheckpointError(f"{folder}/config.json: {message}")
    kind = "siglip" if "siglip" in str(sizes.get("model_type")) else "clip"
    sizes = {**sizes, "model_type": f"{kind}_vision_model"}
    if kind == "siglip":  # its last layer and its head are left away
        layers = int(sizes["num_hidden_layers"]) - 1
        sizes |= {"num_hidden_layers": layers, "vision_use_head": False}
    return {**raw, "vision_config": sizes}


def _is_siglip(raw: Raw) -> bool:
    return str(raw["vision_config"]["model_type"]).startswith("siglip")


def _strategy(raw: Raw) -> str:
    """Whether the first row of the encoder, its class token, is left away."""
    has_class = not _is_siglip(raw)
    return "default" if has_class and raw.get("mm_vision_select_feature") != "cls_patch" else "full"


def _is_tiled(raw: Raw) -> bool:
    return str(raw.get("image_aspect_ratio")).startswith("anyres")


def _pinpoints(raw: Raw) -> list[list[int]]:
    """Sizes that an image is cut to; "(1x1),...,(6x6)" means all of so many tiles each way."""
    given = raw["image_grid_pinpoints"]
    if isinstance(given, list):
        return [[int(height), int(width)] for height, width in given]
    side = int(raw["vision_config"]["image_size"])
    most = int(str(given).rpartition("x")[2].rstrip(")"))
    return [[side * i, side * j] for i in range(1, most + 1) for j in range(1, most + 1)]


def _llava(raw: Raw) -> dict[str, Any]:
    kind = raw.get("mm_projector_type", "linear")
    if kind not in ("mlp2x_gelu", "mlp2x_gelu_Norm"):
        raise ValueError(f"mm_projector_type = {kind!r} is not supported (must be 'mlp2x_gelu')")
    layer = -1 if _is_siglip(raw) else raw.get("mm_vision_select_layer", -2)
    shared = {
        "model_type": "llava",
        "vision_config": dict(raw["vision_config"]),
        "text_config": stub(int(raw["hidden_size"])),
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": _strategy(raw),
        "has_projector_norms": kind.endswith("_Norm"),
    }
    merge = raw.get("mm_patch_merge_type", "flat")
    if not _is_tiled(raw):
        return shared
    if merge != "spatial_unpad":
        raise ValueError(f"mm_patch_merge_type = {merge!r} is not supported with tiles")
    shared |= {"model_type": "llava_next", "image_grid_pinpoints": _pinpoints(raw)}
    ratio = str(raw["image_aspect_ratio"])
    if "_max_" in ratio:
        shared |= {"model_type": "llava_onevision", "vision_aspect_ratio": ratio}
    return shared


def _side(raw: Raw) -> int:
    return int(raw["vision_config"]["image_size"])


def _llava_options(raw: Raw) -> dict[str, Any]:
    patch = int(raw["vision_config"]["patch_size"])
    shared = {"vision_feature_select_strategy": _strategy(raw)}
    if "_max_" in str(raw.get("image_aspect_ratio")):
        places = (_side(raw) // patch) ** 2 + (not _is_siglip(raw))
        ratio = str(raw["image_aspect_ratio"])
        return {**shared, "num_image_tokens": places, "vision_aspect_ratio": ratio}
    extra = 0 if _is_siglip(raw) else 1
    return {**shared, "patch_size": patch, "num_additional_image_tokens": extra}


def _llava_reader(raw: Raw) -> dict[str, Any]:
    side = _side(raw)
    square = {"height": side, "width": side}
    options: dict[str, Any] = {"size": square if _is_siglip(raw) else {"shortest_edge": side}}
    if _is_siglip(raw):
        options |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if _is_tiled(raw):
        options["image_grid_pinpoints"] = _pinpoints(raw)
    else:
        options["do_pad"] = raw.get("image_aspect_ratio") == "pad"
    return (
        options
        if "_max_" in str(raw.get("image_aspect_ratio"))
        else {**options, "crop_size": square}
    )


def _llava_classes(raw: Raw) -> tuple[str, str]:
    """The processor's and the image processor's."""
    if "_max_" in str(raw.get("image_aspect_ratio")):
        return "LlavaOnevisionProcessor", "LlavaOnevision"
    return ("LlavaNextProcessor", "LlavaNext") if _is_tiled(raw) else ("LlavaProcessor", "Llava")


_LLAVA_LAYOUT = Original(
    _llava,
    _LLAVA,
    "LlavaProcessor",
    "Llava",
    _llava_options,
    _llava_reader,
    {"image_token": "<image>"},
    unused=r"vision_tower\.post_layernorm\.|vision_tower\.head\.",
    completed=_with_tower,
    classes=_llava_classes,
    beside=_weights_beside,
    adds_tokens=True,
)

# ---- LLaVA-NeXT-Video ---------------------------------------------------------------------------


def _llava_vid(raw: Raw) -> dict[str, Any]:
    """Frames of videos in squares of four patches. ValueError for images that are not cut to
    tiles, which the class has no rule for, and for other squares, which its processor has none."""
    stride, mode = raw.get("mm_spatial_pool_stride", 2), raw.get("mm_spatial_pool_mode", "average")
    if not _is_tiled(raw) or "_max_" in str(raw["image_aspect_ratio"]) or stride != 2:
        ratio = raw.get("image_aspect_ratio")
        raise ValueError(f"image_aspect_ratio {ratio!r}, mm_spatial_pool_stride {stride!r}")
    own = {"model_type": "llava_next_video", "spatial_pool_mode": mode, "spatial_pool_stride": 2}
    return {**_llava(raw), **own}


def _llava_vid_videos(raw: Raw) -> tuple[str, dict[str, Any]]:
    side = _side(raw)
    square = {"height": side, "width": side}
    options: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": square}
    if _is_siglip(raw):
        options |= {"size": square, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return "LlavaNextVideoVideoProcessor", options


_LLAVA_VID = replace(
    _LLAVA_LAYOUT,
    config=_llava_vid,
    classes=lambda raw: ("LlavaNextVideoProcessor", "LlavaNext"),
    tokens={"image_token": "<image>", "video_token": "<video>"},
    videos=_llava_vid_videos,
)

# ---- Intern-S1 ----------------------------------------------------------------------------------

_INTERN_S1: Rules = ((r"model\.((?:vision_tower|multi_modal_projector)\.)", r"\1"),)
_INTERN_S1_TOWER = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "norm_type", "layer_norm_eps", "num_channels", "attention_bias"),
    *("use_qk_norm", "use_mean_pooling", "use_absolute_position_embeddings"),
    "layer_scale_init_value",
)


def _intern_s1(raw: Raw) -> dict[str, Any]:
    """The layers and names of InternVL as transformers has it."""
    vision = raw["vision_config"]
    encoder = {key: vision[key] for key in _INTERN_S1_TOWER if key in vision}
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


def _intern_s1_reader(raw: Raw) -> dict[str, Any]:
    height, width = _pair(raw["vision_config"]["image_size"])
    return {
        "size": {"height": height, "width": width},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


# ---- Janus and Janus-Pro, what reads images ---------------------------------------------------

_BLOCK, _LAYER = r"vision_model\.vision_tower\.blocks\.(\d+)\.", r"vision_model.encoder.layers.\1."
_JANUS: Rules = (
    (_BLOCK + r"attn\.qkv", _LAYER + "self_attn.[q|k|v]_proj"),
    (_BLOCK + r"attn\.proj", _LAYER + "self_attn.projection_layer"),
    (_BLOCK + r"attn\.", _LAYER + "self_attn."),
    (_BLOCK + r"norm(\d)", _LAYER + r"layer_norm\2"),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
    (
        r"vision_model\.vision_tower\.pos_embed$",
        "vision_model.embeddings.position_embedding.weight",
    ),
    (
        r"vision_model\.vision_tower\.patch_embed\.proj\.",
        "vision_model.embeddings.patch_embedding.",
    ),
    (r"vision_model\.vision_tower\.norm\.", "vision_model.post_layernorm."),
    (r"aligner\.layers\.0\.", "aligner.fc1."),
    (r"aligner\.layers\.2\.", "aligner.hidden_layers.0."),
)
_JANUS_SIZES = {"width": 1024, "layers": 24, "heads": 16, "patch_size": 16, "mlp_ratio": 4}


def _janus_tower(raw: Raw) -> dict[str, Any]:
    """``params`` of the encoder with the sizes of the one that all of them have; ValueError for
    another."""
    params = raw["vision_config"]["params"]
    name = params.get("model_name", "siglip_large_patch16_384")
    if name != "siglip_large_patch16_384":
        raise ValueError(f"the encoder {name!r} is not supported")
    return {**_JANUS_SIZES, "image_size": 384, **params}


def _janus(raw: Raw) -> dict[str, Any]:
    """Images are read, not made: what would make them is as small as it can be."""
    encoder, aligner = _janus_tower(raw), raw["aligner_config"]["params"]
    depth = int(aligner.get("depth", 1))
    if aligner.get("projector_type", "mlp_gelu") != "mlp_gelu" or depth != 2:
        raise ValueError("only an aligner of two layers is supported")
    maker = {"embed_dim": 2, "num_embeddings": 2, "latent_channels": 2, "base_channels": 32}
    small = {"channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 2}
    return {
        "model_type": "janus",
        "text_config": stub(int(aligner["n_embed"])),
        "vq_config": {**maker, **small, "image_token_embed_dim": 2, "num_hidden_layers": 1},
        "vision_config": {
            "hidden_size": encoder["width"],
            "num_hidden_layers": encoder["layers"],
            "num_attention_heads": encoder["heads"],
            "mlp_ratio": encoder["mlp_ratio"],
            "image_size": encoder["image_size"],
            "patch_size": encoder["patch_size"],
            "num_image_tokens": _janus_places(encoder),
            "projection_dim": int(aligner["n_embed"]),
            "depth": depth,
        },
    }


def _janus_places(encoder: Mapping[str, Any]) -> int:
    return (int(encoder["image_size"]) // int(encoder["patch_size"])) ** 2


def _janus_reader(raw: Raw) -> dict[str, Any]:
    side, half = _janus_tower(raw)["image_size"], [0.5, 0.5, 0.5]
    size = {"height": side, "width": side}
    return {"size": size, "image_mean": half, "image_std": half, "min_size": 14}


_JANUS_TOKENS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}

LAYOUTS: dict[str, Original] = {
    **ORIGINALS,
    **AUDIO_LAYOUTS,
    **OCR_LAYOUTS,
    **dict.fromkeys(LLAVA_TEXTS, _LLAVA_LAYOUT),
    "LlavaVidForCausalLM": _LLAVA_VID,
    "YiVLForCausalLM": replace(_LLAVA_LAYOUT, tokens={"image_token": "<image_placeholder>"}),
    "InternS1ForConditionalGeneration": Original(
        _intern_s1,
        _INTERN_S1,
        "InternVLProcessor",
        "GotOcr2",
        _intern_s1_options,
        _intern_s1_reader,
        _INTERNVL_TOKENS,
    ),
    "MultiModalityCausalLM": Original(
        _janus,
        _JANUS,
        "JanusProcessor",
        "Janus",
        lambda raw: {"num_image_tokens": _janus_places(_janus_tower(raw))},
        _janus_reader,
        _JANUS_TOKENS,
        unused=r"generation_|vqmodel\.",
    ),
}
