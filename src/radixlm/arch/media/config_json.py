"""Brings config.json of multimodal checkpoints, as they are published, to one form."""

from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]
# ids of the tokens that begin, fill and end images and videos, beside the text model's config
BOUNDARY_TOKEN_KEYS = tuple(
    f"{kind}_{part}token_id" for kind in ("image", "video") for part in ("", "start_", "end_")
)
# which layers an encoder's output joins (DeepStack), beside the text model's config
DEEPSTACK_KEYS = ("deepstack_layer_map", "spatial_target_layers")
# parts of a checkpoint that generates speech too: they are not loaded
_SPEECH_OUTPUT = ("talker_config", "code2wav_config", "token2wav_config")
# keys of Nemotron's as published -> those of its class
_RENAMED = {
    "sound_context_token_id": "audio_token_id",
    "img_context_token_id": "image_token_id",
    "sound_config": "audio_config",
}
# model_type of an encoder-decoder -> key of a decoder -> (key of its class, default of its class)
_DECODER_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
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
# model_type -> architecture, for folders that do not name theirs
_ARCHITECTURES = {
    "deepseek_vl_v2": "DeepseekVL2ForCausalLM",
    "vila": "VILAForConditionalGeneration",
    "nvila_lite": "NVILALiteForConditionalGeneration",
}
# architecture of a text model that a model with images names too -> that one's
_WITH_VISION = dict.fromkeys(
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"), "GLM4VForCausalLM"
)


def flattened(raw: Raw) -> dict[str, Any]:
    """config.json with the keys of its thinker (Qwen-Omni) or decoder (Whisper) at the top."""
    keys = _DECODER_KEYS.get(str(raw.get("model_type")))
    if keys is not None:
        return {**raw, **{key: raw.get(name, default) for key, (name, default) in keys.items()}}
    thinker = raw.get("thinker_config")
    if not isinstance(thinker, dict):
        renamed = {new: raw[old] for old, new in _RENAMED.items() if old in raw}
        return {**raw, **renamed} if "sound_config" in raw else dict(raw)
    left_out = (*_SPEECH_OUTPUT, "thinker_config")
    outer = {key: value for key, value in raw.items() if key not in left_out}
    identity = {key: raw[key] for key in ("architectures", "model_type") if key in raw}
    return {**outer, **thinker, **identity}


def generates_speech(raw: Raw) -> bool:
    """Whether the checkpoint has parts that generate speech."""
    return any(isinstance(raw.get(key), dict) for key in _SPEECH_OUTPUT)


def architecture_of(raw: Raw) -> str:
    """The architecture that config.json names, or its model_type implies; "" if neither."""
    listed = raw.get("architectures") or [_ARCHITECTURES.get(str(raw.get("model_type")), "")]
    name = str(listed[0])
    return _WITH_VISION.get(name, name) if raw.get("vision_config") else name


def deepstack_layers(raw: Raw) -> tuple[int, ...]:
    """Layers before which an encoder's output is added, in order; () if config.json has no
    ``deepstack_layer_map``."""
    pairs = raw.get("deepstack_layer_map")
    if not pairs:
        return ()
    further = raw.get("spatial_target_layers") or (12, 15, 18, 21)
    return tuple(sorted({*(int(layer) for _, layer in pairs), *(int(one) for one in further)}))
