"""Phi-4-multimodal as its authors publish it: images only."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_IMAGE = "embed_tokens_extend.image_embed."
_NAMES: Rules = (
    (rf"model\.{_IMAGE}img_projection\.0", _IMAGE + "img_projection_up"),
    (rf"model\.{_IMAGE}img_projection\.2", _IMAGE + "img_projection_down"),
    (rf"model\.{_IMAGE}glb_GN", _IMAGE + "global_img_feature_extensor"),
    (rf"model\.{_IMAGE}sub_GN", _IMAGE + "sub_img_feature_extensor"),
    (rf"model\.{_IMAGE}img_processor\.", _IMAGE + "img_processor."),
)


def _config(raw: Raw) -> dict[str, Any]:
    """The vision encoder is always SigLIP of 448 pixels; the audio encoder is not used."""
    text = {"hidden_size": raw["hidden_size"], "vocab_size": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 2}
    audio = {"hidden_size": 8, "num_blocks": 0, "num_attention_heads": 1, "intermediate_size": 2}
    channels = {"nemo_conv_channels": 2, "ext_pw_out_channel": 2}
    return {
        "model_type": "phi4_multimodal",
        "num_hidden_layers": 0,
        **text,
        **heads,
        "vision_config": dict(raw.get("vision_config") or {}),
        "audio_config": {**audio, **channels},
    }


LAYOUT = CheckpointLayout(
    _config,
    _NAMES,
    unused=r"norm\.|layers\.|embed_tokens\.|embed_tokens_extend\.audio_embed\.",
    processor="Phi4MultimodalProcessor",
    image_processor="Phi4Multimodal",
    parts={"audio_processor": "Phi4MultimodalFeatureExtractor"},
    tokens={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
)
