"""Checkpoints with towers that no class of transformers has as a whole: the modules are in
``models/built_towers.py``, their processors in ``multimodal/built.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from radixlm.arch.families.media_layouts import Original, Raw, Rules

# version of a MiniCPM-V or -o -> the family of its text model
_MINICPM_TEXTS = {"2.6": "qwen2", "4.0": "llama", "4": "llama", "4.5": "qwen3"}
_MINICPM: Rules = ((r"(vpm|resampler)\.", r"\1."),)
_SIGLIP_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size", "num_channels", "hidden_act", "layer_norm_eps"),
)
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}


def _minicpm(raw: Raw) -> dict[str, Any]:
    """Of a MiniCPM-V or -o from 2.6 to 4.5."""
    said = raw.get("vision_config") or {}
    tower = {**_SIGLIP, **{key: said[key] for key in _SIGLIP_KEYS if key in said}}
    if raw.get("drop_vision_last_layer", True):
        tower["num_hidden_layers"] -= 1
    return {
        "vision_config": tower,
        "hidden_size": int(raw["hidden_size"]),
        "num_queries": int(raw.get("query_num", 64)),
    }


_BLOCK, _LAYER = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."
_KIMI: Rules = (
    (
        r"vision_tower\.patch_embed\.pos_emb\.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
    ),
    (r"vision_tower\.patch_embed\.", "vision_tower.patch_embed."),
    (r"vision_tower\.encoder\.final_layernorm\.", "vision_tower.final_layernorm."),
    (_BLOCK + "norm0", _LAYER + "norm1"),
    (_BLOCK + "norm1", _LAYER + "norm2"),
    (_BLOCK + r"mlp\.fc0", _LAYER + "mlp.fc1"),
    (_BLOCK + r"mlp\.fc1", _LAYER + "mlp.fc2"),
    (_BLOCK + "wqkv", _LAYER + "attn.[q|k|v]_proj"),
    (_BLOCK + "wo", _LAYER + "attn.proj"),
    (r"multi_modal_projector\.pre_norm", "mm_projector.pre_norm"),
    (r"multi_modal_projector\.linear_1", "mm_projector.in_proj"),
    (r"multi_modal_projector\.linear_2", "mm_projector.out_proj"),
)


def _kimi(raw: Raw) -> dict[str, Any]:
    """Of Kimi-VL, whose tower is Kimi K2.5's without frames."""
    said = raw["vision_config"]
    kept = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("patch_size", "merge_kernel_size"),
    )
    tower = {key: said[key] for key in kept if key in said}
    tower["pos_emb_height"] = said.get("init_pos_emb_height", 64)
    tower["pos_emb_width"] = said.get("init_pos_emb_width", 64)
    return {
        "vision_config": tower,
        "hidden_size": int(raw["text_config"]["hidden_size"]),
        "projection_hidden_size": said.get("hidden_size", 1152),
    }


@dataclass(frozen=True, slots=True)
class Built:
    """``kind``: the name of the module and of the processor; ``layout``: what they are made of."""

    kind: Literal["minicpm", "kimi"]
    layout: Original


BUILT: dict[str, Built] = {
    "MiniCPMV": Built("minicpm", Original(_minicpm, _MINICPM)),
    "MiniCPMO": Built("minicpm", Original(_minicpm, _MINICPM)),
    "KimiVLForConditionalGeneration": Built("kimi", Original(_kimi, _KIMI)),
}


def text_type(architecture: str, raw: Raw) -> str:
    """The family of a text model whose config stands at the top without its name; "" if unknown."""
    if architecture in ("MiniCPMV", "MiniCPMO"):
        return _MINICPM_TEXTS.get(str(raw.get("version", "")), "")
    return ""
