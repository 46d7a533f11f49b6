"""Ovis: encoders with a visual vocabulary (``models/encoders/ovis.py``). 2.5 takes images in
patches, 1.6 and 2 in tiles."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_NAMES: Rules = (
    (r"visual_tokenizer\.vit\.vision_model\.", "vit."),
    (r"visual_tokenizer\.head\.", "head."),
    (r"vte\.weight", "vte.weight"),
)
_ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 512,
    "patch_size": 16,
    "hidden_stride": 2,
}
# keys with the values that the encoder is written for
_FIXED = {
    "model_type": "siglip2_navit",
    "hidden_act": "gelu_pytorch_tanh",
    "num_patches": -1,
    "temporal_patch_size": 1,
    "preserve_original_pe": True,
    "use_rope": True,
    "fullatt_block_indexes": None,
}


def encoder_sizes(raw: Raw) -> dict[str, Any]:
    """ValueError for an encoder of another kind."""
    given = raw["vit_config"]
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            raise ValueError(f"vit_config: {key} = {given[key]!r} is not {value!r}")
    sizes = {key: given.get(key, value) for key, value in _ENCODER.items()}
    return {**sizes, "eps": float(given.get("layer_norm_eps", 1e-6))}


def _config(raw: Raw) -> dict[str, Any]:
    width = raw.get("hidden_size") or raw["llm_config"]["hidden_size"]
    vocab = int(raw.get("visual_vocab_size") or 65536)
    sizes = encoder_sizes(raw)
    return {"vision_config": sizes, "hidden_size": int(width), "visual_vocab_size": vocab}


LAYOUT = CheckpointLayout(_config, _NAMES)

# ---- Ovis 1.6 and 2 -----------------------------------------------------------------------------

_VIT, _TRUNK = r"visual_tokenizer\.backbone\.", r"trunk\.blocks\.(\d+)\."
_TILES: Rules = (
    (_VIT + r"preprocessor\.patchifier\.proj\.", "vit.embeddings.patch_embedding."),
    (_VIT + r"preprocessor\.patchifier\.norm\.", "vit.embeddings.rms_norm."),
    (_VIT + r"preprocessor\.pos_embed", "vit.embeddings.position_embedding.weight"),
    (_VIT + _TRUNK + r"norm_([12])\.", r"vit.encoder.layers.\1.rms_norm\2."),
    (_VIT + _TRUNK + r"attn\.qkv\.", r"vit.encoder.layers.\1.attention.[q|k|v]_proj."),
    (_VIT + _TRUNK + r"attn\.proj\.", r"vit.encoder.layers.\1.attention.out_proj."),
    (_VIT + _TRUNK + r"mlp\.fc1\.", r"vit.encoder.layers.\1.ffn.gate_proj."),
    (_VIT + _TRUNK + r"mlp\.fc2\.", r"vit.encoder.layers.\1.ffn.down_proj."),
    (_VIT + _TRUNK + r"mlp\.fc3\.", r"vit.encoder.layers.\1.ffn.up_proj."),
    (_VIT + r"(?:vision_model\.)?((?:embeddings|encoder)\.)", r"vit.\1"),
    (r"visual_tokenizer\.head\.", "head."),
    (r"vte\.weight", "vte.weight"),
)
_TOKENIZE = ("softmax", "st_argmax", "gumbel_argmax")
# model_type of the text model -> the token that stands for each of an image's rows
PLACEHOLDERS = {
    "gemma2": "<unused0>",
    "llama": "<|reserved_special_token_0|>",
    "qwen2": "<|image_pad|>",
}


def tiles_config(raw: Raw) -> dict[str, Any]:
    """ValueError for an encoder of another kind."""
    given = raw["visual_tokenizer_config"]
    vision, tokenize = dict(given["backbone_config"]), given.get("tokenize_function", "softmax")
    kind = vision.pop("model_type", "aimv2")
    if kind not in ("aimv2", "siglip_vision_model") or tokenize not in _TOKENIZE:
        raise ValueError(f"visual_tokenizer_config: {kind!r}, tokenize_function {tokenize!r}")
    if given.get("drop_cls_token"):
        raise ValueError("visual_tokenizer_config: drop_cls_token = true")
    return {
        "kind": kind,
        "vision_config": vision,
        "tokenize_function": tokenize,
        "hidden_stride": int(given.get("hidden_stride", 1)),
        "visual_vocab_size": int(given["vocab_size"]),
        "hidden_size": int(raw.get("hidden_size") or raw["llm_config"]["hidden_size"]),
    }


TILES = CheckpointLayout(tiles_config, _TILES, unused=r"vit\.(?:head|post_layernorm)\.")
