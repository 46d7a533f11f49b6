"""VILA, NVILA-Lite and JetVLM; the encoder is ``models/encoders/custom.py``'s."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules
from radixlm.arch.media.layouts.minicpm import SIGLIP, SIGLIP_KEYS

_PARTS = r"((?:embeddings|encoder)\.)"
_NAMES: Rules = (
    (rf"(?:vision_tower\.)+(?:vision_model\.)?{_PARTS}", r"vision_tower.\1"),
    (r"mm_projector\.layers\.", "projector."),
)
# projector -> rows and columns of patches that make one placeholder
_MERGES = {"mlp_downsample_3x3_fix": 3, "mlp_downsample_2x2_fix": 2}
_DEFAULTS = {"jet_vlm": "mlp_downsample_2x2_fix"}  # by model_type


def spatial_merge_size(raw: Raw) -> int:
    """Rows and columns of patches that make one placeholder. ValueError for another projector."""
    default = _DEFAULTS.get(str(raw.get("model_type")), "mlp_downsample_3x3_fix")
    kind = str(raw.get("mm_projector_type") or default)
    if kind not in _MERGES or raw.get("mm_vision_select_feature", "cls_patch") != "cls_patch":
        select = raw.get("mm_vision_select_feature")
        raise ValueError(f"mm_projector_type {kind!r}, mm_vision_select_feature {select!r}")
    return _MERGES[kind]


def _config(raw: Raw) -> dict[str, Any]:
    """The encoder's layers behind the one whose output is used are left out."""
    encoder = {**_ENCODER, **{k: v for k, v in raw["vision_config"].items() if k in SIGLIP_KEYS}}
    behind = -1 - int(raw.get("mm_vision_select_layer", -2))
    if not 0 <= behind < encoder["num_hidden_layers"]:
        raise ValueError(f"mm_vision_select_layer {raw.get('mm_vision_select_layer')!r}")
    encoder["num_hidden_layers"] -= behind
    dim = raw.get("hidden_size") or raw["text_config"]["hidden_size"]
    return {"vision_config": encoder, "hidden_size": int(dim), "merge": spatial_merge_size(raw)}


_ENCODER = {**SIGLIP, "image_size": 448, "num_channels": 3}


LAYOUT = CheckpointLayout(_config, _NAMES)
