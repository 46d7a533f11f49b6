"""Readers of ``MultimodalSpec``: each takes a model's row and config.json and fills the row in."""

from collections.abc import Mapping
from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.spec import MODALITIES, Canvas, MultimodalSpec
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace


def placeholders(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """The placeholder tokens and what ``vision_config`` says of grids and time."""
    tokens = {}
    for modality in MODALITIES:
        if modality == "video" and spec.video == "none":
            continue
        if modality == "audio" and raw.get("audio_config", raw) is None:
            continue  # the smaller models of a family may have no audio encoder
        token = raw.get(f"{modality}_token_id", raw.get(f"{modality}_token_index"))
        if isinstance(token, int):
            tokens[modality] = token
    image = raw.get("media_placeholder_token_id", raw.get("image_patch_id"))
    if image is None and "image" not in tokens:  # models whose images are tokens of a VQ-VAE
        image = (raw.get("vocabulary_map") or {}).get("<image>")
    if isinstance(image, int):
        tokens["image"] = image
    vision = raw.get("vision_config") or {}
    return replace(
        spec,
        tokens=tokens,
        visual_indicator_tokens=tuple(raw.get("visual_indicator_token_ids") or ()),
        spatial_merge_size=int(vision.get("spatial_merge_size") or 2),
        tokens_per_second=float(vision.get("tokens_per_second") or 0),
    )


def nothing(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """For models whose prompts have no placeholders."""
    return spec


def decoder_start(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """The token that starts the decoder stands for the audio (Whisper)."""
    return replace(spec, tokens={"audio": int(raw["decoder_start_token_id"])})


def phi4(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """``vision_config`` names the image token."""
    spec = placeholders(spec, raw)
    token = (raw.get("vision_config") or {}).get("image_token_id")
    return replace(spec, tokens={**spec.tokens, "image": token}) if isinstance(token, int) else spec


def gemma4(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """The text model's config says whether an image's tokens attend to each other both ways."""
    is_vision = _text(raw).get("use_bidirectional_attention") == "vision"
    return replace(placeholders(spec, raw), bidirectional="image" if is_vision else "")


def gemma4_unified(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """As ``gemma4``, with "vision" the default; an image must fit into the sliding window."""
    spec, text = placeholders(spec, raw), _text(raw)
    if text.get("use_bidirectional_attention", "vision") != "vision":
        return spec
    window = int(text.get("sliding_window") or 1024)
    return replace(spec, bidirectional="image", max_image_tokens=window)


def embedding_multiplier(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """``embed_scale`` of the text model's config; the row has the class's default."""
    text = raw.get("text_config")
    spec = placeholders(spec, raw)
    if not isinstance(text, Mapping):
        return replace(spec, embed_scale=1.0)
    scale = text.get("embedding_multiplier")
    return spec if scale is None else replace(spec, embed_scale=float(scale))


def canvas(spec: MultimodalSpec, raw: Raw) -> MultimodalSpec:
    """CheckpointError if config.json lacks one of the tokens around crops (MiniCPM-V 4.7)."""
    names = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")
    ids = [raw.get(name) for name in names]
    if not all(isinstance(one, int) for one in ids):
        raise CheckpointError(f"config.json: one of {', '.join(names)} is missing")
    a, b, c, d, e = (int(one or 0) for one in ids)
    merge = 2 if raw.get("downsample_mode") == "4x" else 4
    return replace(placeholders(spec, raw), canvas=Canvas(a, b, c, d, e, merge))


def _text(raw: Raw) -> Mapping[str, Any]:
    return raw.get("text_config") or {}
