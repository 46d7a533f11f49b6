"""Qwen-Omni, whose thinker alone is served, and Qwen3-ASR as published."""

from typing import Any

from radixlm.arch.media.config_json import Raw, flattened
from radixlm.arch.media.layout import CheckpointLayout, Rules


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

OMNI = CheckpointLayout(_thinker, _OMNI, unused="language_model")
ASR = CheckpointLayout(_asr, _ASR, unused="language_model")
