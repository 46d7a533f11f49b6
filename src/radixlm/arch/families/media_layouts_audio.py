"""Checkpoints that hear: where their text model is told of, and published names of their
encoders."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.media_layouts import Original, Raw, Rules

# of a checkpoint that speaks too: how it thinks is read, how it talks is left out
_SPEAKS = ("talker_config", "code2wav_config", "token2wav_config", "thinker_config")


# model_type of an encoder and a decoder -> key of a decoder -> (the config's own, its default)
_ENCODED: dict[str, dict[str, tuple[str, Any]]] = {
    "whisper": {
        "hidden_size": ("d_model", 384),
        "num_hidden_layers": ("decoder_layers", 4),
        "num_attention_heads": ("decoder_attention_heads", 6),
        "intermediate_size": ("decoder_ffn_dim", 1536),
        "max_position_embeddings": ("max_target_positions", 448),
        "vocab_size": ("vocab_size", 51865),
        "activation_function": ("activation_function", "gelu"),
        "decoder_start_token_id": ("decoder_start_token_id", 50257),
        "eos_token_id": ("eos_token_id", 50256),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
}


# keys of Nemotron's as published -> those of its class
_RENAMED = {
    "sound_context_token_id": "audio_token_id",
    "img_context_token_id": "image_token_id",
    "sound_config": "audio_config",
}


def unwrapped(raw: Raw) -> dict[str, Any]:
    """config.json with what its thinker or decoder says at the top; as it is where it has none."""
    keys = _ENCODED.get(str(raw.get("model_type")))
    if keys is not None:
        return {**raw, **{key: raw.get(own, default) for key, (own, default) in keys.items()}}
    thinker = raw.get("thinker_config")
    if not isinstance(thinker, dict):
        renamed = {new: raw[old] for old, new in _RENAMED.items() if old in raw}
        return {**raw, **renamed} if "sound_config" in raw else dict(raw)
    outer = {key: value for key, value in raw.items() if key not in _SPEAKS}
    kept = {key: raw[key] for key in ("architectures", "model_type") if key in raw}
    return {**outer, **thinker, **kept}


def speaks(raw: Raw) -> bool:
    """Whether the checkpoint has more to it than text."""
    return any(isinstance(raw.get(key), dict) for key in _SPEAKS[:-1])


def _thinker(raw: Raw) -> dict[str, Any]:
    """Of Qwen-Omni."""
    held = {k: v for k, v in unwrapped(raw).items() if k not in ("architectures", "model_type")}
    return {**held, "model_type": f"{raw['model_type']}_thinker"}


def _asr(raw: Raw) -> dict[str, Any]:
    """Of Qwen3-ASR, as published or in the layout of its class."""
    held = {k: v for k, v in unwrapped(raw).items() if k not in ("architectures", "model_type")}
    known = ("audio_config", "text_config", "audio_token_id", "tie_word_embeddings")
    kept = {key: held[key] for key in known if key in held}
    audio = {**kept["audio_config"], "model_type": "qwen3_asr_encoder"}
    text = {**kept["text_config"], "model_type": "qwen3"}
    return {**kept, "audio_config": audio, "text_config": text, "model_type": "qwen3_asr"}


_OMNI: Rules = ((r"thinker\.(audio_tower|visual)\.", r"\1."),)
_ASR: Rules = (
    (r"(thinker|model)\.audio_tower\.proj1\.", "multi_modal_projector.linear_1."),
    (r"(thinker|model)\.audio_tower\.proj2\.", "multi_modal_projector.linear_2."),
    (r"(thinker|model)\.(audio_tower|multi_modal_projector)\.", r"\2."),
)
# those that speak as well as hear, as a whole
OMNIS = (
    *("Qwen3OmniMoeForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration"),
    "Qwen2_5OmniModel",
)
AUDIO_LAYOUTS: dict[str, Original] = {
    **dict.fromkeys(OMNIS, Original(_thinker, _OMNI, unused="language_model")),
    "Qwen3ASRForConditionalGeneration": Original(_asr, _ASR, unused="language_model"),
}
# whose processor takes one audio clip a text, though the model hears several
ONE_BY_ONE = ("GlmAsrForConditionalGeneration", "Qwen3ASRForConditionalGeneration")
# whose processor is our own (``multimodal/audio_processors.py``)
EARS = {
    "VoxtralForConditionalGeneration": "voxtral",
    "WhisperForConditionalGeneration": "encoder",
    "GraniteSpeechForConditionalGeneration": "granite",
}
# how a transcript is asked for and read (``entrypoints/http/speech/transcribers.py``); others are
# asked
TRANSCRIBERS = {
    "WhisperForConditionalGeneration": "tokens",
    "VoxtralForConditionalGeneration": "marked",
    "Qwen3ASRForConditionalGeneration": "tagged",
}
# what those were trained on that are asked
INSTRUCTIONS = {
    "GlmAsrForConditionalGeneration": "Please transcribe this audio into text",
    "GraniteSpeechForConditionalGeneration": "can you transcribe the speech into a written format?",
}
# whose processor needs torchvision: audio clips are read without
SOUNDS_ALONE = ("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3")
# whose class goes by another model_type
RETYPED = dict.fromkeys(SOUNDS_ALONE, "nemotron_h_omni")
