"""MiniCPM-V and MiniCPM-o from 2.6 to 4.5; the encoder is ``models/encoders/custom.py``'s."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

# version -> model_type of the text model
_TEXT_MODEL_TYPES = {"2.6": "qwen2", "4.0": "llama", "4": "llama", "4.5": "qwen3"}
_NAMES: Rules = ((r"(vpm|resampler)\.", r"\1."),)
SIGLIP_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size", "num_channels", "hidden_act", "layer_norm_eps"),
)
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}


def _config(raw: Raw) -> dict[str, Any]:
    """SigLIP's sizes; one layer less where the last one is not used."""
    vision = raw.get("vision_config") or {}
    encoder = {**SIGLIP, **{key: vision[key] for key in SIGLIP_KEYS if key in vision}}
    if raw.get("drop_vision_last_layer", True):
        encoder["num_hidden_layers"] -= 1
    return {
        "vision_config": encoder,
        "hidden_size": int(raw["hidden_size"]),
        "num_queries": int(raw.get("query_num", 64)),
    }


def text_model_type(raw: Raw) -> str:
    """By the version of the model; "" for one that is not known."""
    return _TEXT_MODEL_TYPES.get(str(raw.get("version", "")), "")


LAYOUT = CheckpointLayout(_config, _NAMES)
