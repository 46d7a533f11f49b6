"""Nemotron Nano VL: the vision side of Nemotron Omni, with images in tiles and without a projection
of video patches."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, stub

# name of a vision transformer -> channels, layers and heads
_SIZES = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
_CLASS_TOKENS = 3  # as the class counts; with the registers they are ``register_multiple``


def _config(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    width, layers, heads = _SIZES[vision["args"]["model"]]
    encoder = {
        "model_type": "radio",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": int(vision.get("patch_size") or raw.get("patch_size") or 16),
        "max_img_size": int(vision.get("max_resolution") or 2048),
        "num_registers": int(vision["args"].get("register_multiple") or 10) - _CLASS_TOKENS,
        "video_temporal_patch_size": 2,
    }
    kept = ("downsample_ratio", "projector_hidden_size")
    return {
        "model_type": "nemotron_h_omni",
        **{key: raw[key] for key in kept if key in raw},
        "vision_hidden_size": width,
        "vision_config": encoder,
        "audio_config": None,
        "text_config": {**stub(int(raw["llm_config"]["hidden_size"])), "model_type": "nemotron_h"},
    }


LAYOUT = CheckpointLayout(_config, unused=r"vision_model\.embeddings\.video_patch_projection\.")
