"""MiDashengLM: Dasheng's audio encoder (``models/encoders/dasheng.py``) beside Qwen2.5-Omni's text
model."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_NAMES: Rules = (
    (r"audio_encoder\.front_end\.", "front_end."),
    (r"audio_encoder\.", "audio_encoder."),
    (r"audio_projector\.", "audio_projector."),
)
_SIZES: dict[str, Any] = {
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "init_values": None,
    "n_mels": 64,
    "patch_size": 16,
    "patch_stride": 16,
    "target_length": 1012,
    "n_fft": 512,
    "win_length": 512,
    "hop_length": 160,
    "f_min": 0.0,
    "f_max": 8000.0,
    "sample_rate": 16000,
}


def encoder_sizes(raw: Raw) -> dict[str, Any]:
    """ValueError for patches that overlap, or that do not hold all bands."""
    given = raw["audio_encoder_config"]
    sizes = {key: given.get(key, value) for key, value in _SIZES.items()}
    for key in ("patch_size", "patch_stride"):
        both = sizes[key] if isinstance(sizes[key], list) else [sizes[key]] * 2
        sizes[key] = [int(one) for one in both]
    patch, one_channel = sizes["patch_size"], given.get("input_channels", 1) == 1
    if patch != sizes["patch_stride"] or patch[0] != sizes["n_mels"] or not one_channel:
        raise ValueError(f"audio_encoder_config: patch_size {patch}, n_mels {sizes['n_mels']}")
    if not given.get("center", True):
        raise ValueError("audio_encoder_config: center = false")
    return {**sizes, "subsample_factor": int(raw.get("subsample_factor", 5))}


def _config(raw: Raw) -> dict[str, Any]:
    return {**encoder_sizes(raw), "hidden_size": int(raw["text_config"]["hidden_size"])}


LAYOUT = CheckpointLayout(_config, _NAMES, unused=r".*\.num_batches_tracked$")
