"""LLaVA as its authors publish it. Its config has the text model's keys at the top and names its
vision encoder, whose sizes and often whose weights are in another folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.json_file import read_object
from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub, with_pixels
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 768,
}
# sizes of encoders, for a checkpoint that has their weights and no folder of theirs
ENCODERS: Mapping[str, Mapping[str, Any]] = {
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
_ENCODER_PARTS = r"((?:embeddings|pre_layrnorm|encoder|post_layernorm)\.)"
_LLAVA: Rules = (
    (
        rf"(?:model\.vision_tower\.vision_tower\.)?(?:vision_model\.)?{_ENCODER_PARTS}",
        r"vision_tower.\1",
    ),
    (r"model\.(?:vision_resampler\.)?mm_projector\.0\.", "multi_modal_projector.linear_1."),
    (r"model\.(?:vision_resampler\.)?mm_projector\.2\.", "multi_modal_projector.linear_2."),
    (r"model\.mm_projector\.1\.", "multi_modal_projector.act.0."),  # where norms follow both
    (r"model\.mm_projector\.3\.", "multi_modal_projector.linear_2.0."),
    (r"model\.mm_projector\.4\.", "multi_modal_projector.linear_2.1."),
    (r"model\.image_newline", "image_newline"),
)


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


def _with_encoder(raw: Raw, folder: Path) -> Raw:
    """The config with the sizes of the encoder that it names under ``vision_config``.
    CheckpointError if they are not known."""
    name = str(raw.get("mm_vision_tower") or "")
    beside = vision_encoder_folder(raw, folder)
    sizes = ENCODERS.get(name.rpartition("/")[2])
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
    if kind == "siglip":  # its last layer and its head are not used
        layers = int(sizes["num_hidden_layers"]) - 1
        sizes |= {"num_hidden_layers": layers, "vision_use_head": False}
    return {**raw, "vision_config": sizes}


def _is_siglip(raw: Raw) -> bool:
    return str(raw["vision_config"]["model_type"]).startswith("siglip")


def _strategy(raw: Raw) -> str:
    """Whether the first row of the encoder, its class token, is not used."""
    has_class = not _is_siglip(raw)
    return "default" if has_class and raw.get("mm_vision_select_feature") != "cls_patch" else "full"


def _is_tiled(raw: Raw) -> bool:
    return str(raw.get("image_aspect_ratio")).startswith("anyres")


def _pinpoints(raw: Raw) -> list[list[int]]:
    """Sizes that an image is cut to; "(1x1),...,(6x6)" means all up to so many tiles each way."""
    sizes = raw["image_grid_pinpoints"]
    if isinstance(sizes, list):
        return [[int(height), int(width)] for height, width in sizes]
    side = int(raw["vision_config"]["image_size"])
    limit = int(str(sizes).rpartition("x")[2].rstrip(")"))
    return [[side * i, side * j] for i in range(1, limit + 1) for j in range(1, limit + 1)]


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


def _llava_image_options(raw: Raw) -> dict[str, Any]:
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


def _llava_processors(raw: Raw) -> tuple[str, str]:
    """The processor's and the image processor's."""
    if "_max_" in str(raw.get("image_aspect_ratio")):
        return "LlavaOnevisionProcessor", "LlavaOnevision"
    return ("LlavaNextProcessor", "LlavaNext") if _is_tiled(raw) else ("LlavaProcessor", "Llava")


LLAVA = CheckpointLayout(
    _llava,
    _LLAVA,
    unused=r"vision_tower\.post_layernorm\.|vision_tower\.head\.",
    completed=_with_encoder,
    extra_weights=_weights_beside,
    processors=_llava_processors,
    processor="LlavaProcessor",
    image_processor="Llava",
    options=_llava_options,
    image_options=_llava_image_options,
    tokens={"image_token": "<image>"},
    adds_tokens=True,
)
YI_VL = replace(LLAVA, tokens={"image_token": "<image_placeholder>"})

# ---- LLaVA-NeXT-Video ---------------------------------------------------------------------------


def _llava_video(raw: Raw) -> dict[str, Any]:
    """ValueError for images that are not tiled, which the class has no code for, and for strides
    other than 2, which its processor has none for."""
    stride, mode = raw.get("mm_spatial_pool_stride", 2), raw.get("mm_spatial_pool_mode", "average")
    if not _is_tiled(raw) or "_max_" in str(raw["image_aspect_ratio"]) or stride != 2:
        ratio = raw.get("image_aspect_ratio")
        raise ValueError(f"image_aspect_ratio {ratio!r}, mm_spatial_pool_stride {stride!r}")
    keys = {"model_type": "llava_next_video", "spatial_pool_mode": mode, "spatial_pool_stride": 2}
    return {**_llava(raw), **keys}


def _llava_video_processor(raw: Raw) -> tuple[str, dict[str, Any]]:
    side = _side(raw)
    square = {"height": side, "width": side}
    options: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": square}
    if _is_siglip(raw):
        options |= {"size": square, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return "LlavaNextVideoVideoProcessor", options


LLAVA_VIDEO = replace(
    LLAVA,
    config=_llava_video,
    processors=lambda raw: ("LlavaNextVideoProcessor", "LlavaNext"),
    tokens={"image_token": "<image>", "video_token": "<video>"},
    video_processor=_llava_video_processor,
)

# ---- Bee and R-4B -------------------------------------------------------------------------------

_ONEVISION_KEYS = (
    *("image_grid_pinpoints", "vision_feature_layer", "vision_feature_select_strategy"),
    *("vision_aspect_ratio", "projector_hidden_act"),
)
_PIXELS = ("size", "crop_size", "image_mean", "image_std", "resample", "image_grid_pinpoints")


def _normed(raw: Raw, widening: int) -> dict[str, Any]:
    """LLaVA-OneVision with a norm before its projector, which is ``widening`` times as wide as the
    text model inside."""
    dim = int(raw["text_config"]["hidden_size"])
    return {
        "model_type": "llava_onevision",
        **{key: raw[key] for key in _ONEVISION_KEYS if key in raw},
        "vision_config": dict(raw["vision_config"]),
        "text_config": stub(dim),
        "projector_shape": {"inner": widening * dim, "bias": True, "norm_eps": 1e-6},
    }


def _normed_options(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    return {
        "num_image_tokens": (int(vision["image_size"]) // int(vision["patch_size"])) ** 2,
        "vision_feature_select_strategy": raw.get("vision_feature_select_strategy", "full"),
        "vision_aspect_ratio": raw.get("vision_aspect_ratio", "anyres_max_9"),
    }


R_4B = CheckpointLayout(
    lambda raw: _normed(raw, 1),
    (
        (rf"(?:model\.)?vision_tower\.(?:vision_model\.)?{_ENCODER_PARTS}", r"vision_tower.\1"),
        (r"(?:model\.)?multi_modal_projector\.pre_norm\.", "multi_modal_projector.linear_1.0."),
        (r"(?:model\.)?multi_modal_projector\.linear_1\.", "multi_modal_projector.linear_1.1."),
        (r"(?:model\.)?multi_modal_projector\.linear_2\.", "multi_modal_projector.linear_2."),
        (r"(?:model\.)?image_newline", "image_newline"),
    ),
    unused=r"vision_tower\.post_layernorm\.|vision_tower\.head\.",
    completed=with_pixels,
    processor="LlavaOnevisionProcessor",
    image_processor="LlavaOnevision",
    options=_normed_options,
    image_options=lambda raw: {k: raw["pixels"][k] for k in _PIXELS if k in raw["pixels"]},
    tokens={"image_token": "<image>"},
)
BEE = replace(R_4B, config=lambda raw: _normed(raw, 4))
