"""Kimi-VL; its encoder is ``models/encoders/custom.py``'s."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules

_BLOCK, _LAYER = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."
_NAMES: Rules = (
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


def _config(raw: Raw) -> dict[str, Any]:
    """Kimi-VL's encoder is that of Kimi K2.5, for single frames."""
    vision = raw["vision_config"]
    kept = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("patch_size", "merge_kernel_size"),
    )
    encoder = {key: vision[key] for key in kept if key in vision}
    encoder["pos_emb_height"] = vision.get("init_pos_emb_height", 64)
    encoder["pos_emb_width"] = vision.get("init_pos_emb_width", 64)
    return {
        "vision_config": encoder,
        "hidden_size": int(raw["text_config"]["hidden_size"]),
        "projection_hidden_size": vision.get("hidden_size", 1152),
    }


LAYOUT = CheckpointLayout(_config, _NAMES)
