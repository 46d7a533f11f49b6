"""Phi-3-vision and Phi-3.5-vision, whose config has the text model's keys at the top and names its
encoder."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules
from radixlm.arch.media.layouts.llava import ENCODERS

_TOP = r"model\.vision_embed_tokens\."
_NAMES: Rules = (
    (
        _TOP + r"img_processor\.(?:vision_model\.)?((?:embeddings|pre_layrnorm|encoder)\.)",
        r"vision_tower.\1",
    ),
    (_TOP + r"(img_projection\.|glb_GN|sub_GN)", r"\1"),
)


def encoder_sizes(raw: Raw) -> dict[str, Any]:
    """Of the CLIP that ``img_processor`` names, whole. KeyError for another encoder."""
    return dict(ENCODERS[str(raw["img_processor"]["model_name"]).rpartition("/")[2]])


def text_model_type(raw: Raw) -> str:
    """The text model is Phi 3's."""
    return "phi3"


def _config(raw: Raw) -> dict[str, Any]:
    """The encoder's layers behind the one whose output is used are left out."""
    embeds, images = raw["embd_layer"], raw["img_processor"]
    order, feature = embeds.get("hd_transform_order"), images.get("type_feature", "patch")
    if not embeds.get("use_hd_transform") or (order, feature) != ("sub_glb", "patch"):
        raise ValueError(f"hd_transform_order {order!r}, type_feature {feature!r}")
    encoder = encoder_sizes(raw)
    layer = int(images.get("layer_idx", -2))
    count = layer if layer >= 0 else encoder["num_hidden_layers"] + 1 + layer
    encoder["num_hidden_layers"] = count
    return {"vision_config": encoder, "hidden_size": int(raw["hidden_size"])}


LAYOUT = CheckpointLayout(_config, _NAMES)
