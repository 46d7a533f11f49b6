"""Qwen-Omni, whose thinker alone is served, Qwen3-ASR as published, and models with the encoders of
Qwen2-VL and Qwen2.5-VL: POINTS 1.5, Sarashina2-Vision, Tarsier 2, OpenCUA."""

from typing import Any

from radixlm.arch.media.config_json import Raw, flattened
from radixlm.arch.media.layout import CheckpointLayout, Rules, stub, with_pixels
from radixlm.base.record import replace


def _thinker(raw: Raw) -> dict[str, Any]:
    """The thinker of Qwen-Omni."""
    flat = {k: v for k, v in flattened(raw).items() if k not in ("architectures", "model_type")}
    return {**flat, "model_type": f"{raw['model_type']}_thinker"}


def _asr(raw: Raw) -> dict[str, Any]:
    """Qwen3-ASR, as published or in the layout of its class."""
    flat = {k: v for k, v in flattened(raw).items() if k not in ("architectures", "model_type")}
    keys = ("audio_config", "text_config", "audio_token_id", "tie_word_embeddings")
    kept = {key: flat[key] for key in keys if key in flat}
    audio = {**kept["audio_config"], "model_type": "qwen3_asr_encoder"}
    text = {**kept["text_config"], "model_type": "qwen3"}
    return {**kept, "audio_config": audio, "text_config": text, "model_type": "qwen3_asr"}


_OMNI: Rules = ((r"thinker\.(audio_tower|visual)\.", r"\1."),)
_ASR: Rules = (
    (r"(thinker|model)\.audio_tower\.proj1\.", "multi_modal_projector.linear_1."),
    (r"(thinker|model)\.audio_tower\.proj2\.", "multi_modal_projector.linear_2."),
    (r"(thinker|model)\.(audio_tower|multi_modal_projector)\.", r"\2."),
)

_POINTS: Rules = (
    (r"vision_encoder\.", "visual."),
    (r"vision_projector\.", "visual.merger."),
)
_SARASHINA: Rules = (
    (r"visual\.merger\.", "visual.merger.0."),
    (r"visual\.", "visual."),
    (r"norm\.", "visual.merger.1."),
)
_PIXELS = (
    *("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels", "size"),
    *("image_mean", "image_std"),
)


def _sarashina(raw: Raw) -> dict[str, Any]:
    """Qwen2-VL with a norm of its output."""
    return {**_points({**raw, "llm_config": raw["text_config"]}), "has_output_norm": True}


def _points(raw: Raw) -> dict[str, Any]:
    """Qwen2-VL, whose merger is as wide as the text model."""
    text = stub(int(raw["llm_config"]["hidden_size"]))
    vision = {**raw["vision_config"], "hidden_size": text["hidden_size"]}
    text |= {"model_type": "qwen2_vl_text"}
    return {"model_type": "qwen2_vl", "vision_config": vision, "text_config": text}


def _opencua(raw: Raw) -> dict[str, Any]:
    """Qwen2.5-VL's encoder."""
    text = {**stub(int(raw["text_config"]["hidden_size"])), "model_type": "qwen2_5_vl_text"}
    vision = {**raw["vision_config"], "model_type": "qwen2_5_vl"}
    vision.setdefault("out_hidden_size", text["hidden_size"])
    return {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": text}


def _tarsier2(raw: Raw) -> dict[str, Any]:
    """Qwen2-VL."""
    text = {**stub(int(raw["text_config"]["hidden_size"])), "model_type": "qwen2_vl_text"}
    vision = {**raw["vision_config"], "model_type": "qwen2_vl"}
    return {"model_type": "qwen2_vl", "vision_config": vision, "text_config": text}


def points_text(raw: Raw) -> str:
    """The text model is Qwen 2's."""
    return "qwen2"


OMNI = CheckpointLayout(_thinker, _OMNI, unused="language_model")
ASR = CheckpointLayout(_asr, _ASR, unused="language_model")
POINTS = CheckpointLayout(
    _points,
    _POINTS,
    completed=with_pixels,
    processor="Qwen2VLProcessor",
    image_processor="Qwen2VL",
    image_options=lambda raw: {k: raw["pixels"][k] for k in _PIXELS if k in raw["pixels"]},
    tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
)
SARASHINA = replace(
    POINTS,
    config=_sarashina,
    names=_SARASHINA,
    tokens={"image_token": "<|file|>", "video_token": "<|video_pad|>"},
)
OPENCUA = replace(
    POINTS,
    config=_opencua,
    names=((r"(?:vision_tower|visual)\.", "visual."),),
    processor="Qwen2_5_VLProcessor",
    tokens={"image_token": "<|media_placeholder|>", "video_token": "<|video_pad|>"},
)
TARSIER2 = replace(POINTS, config=_tarsier2, names=((r"vision_tower\.", "visual."),))
