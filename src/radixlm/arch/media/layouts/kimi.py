"""Kimi-VL and LocateAnything; their encoders are ``models/encoders/kimi.py``'s."""

from typing import Any

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layout import CheckpointLayout, Rules


def _tower(name: str) -> Rules:
    """MoonViT's tensors under ``name``."""
    block, layer = name + r"\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."
    return (
        (
            name + r"\.patch_embed\.pos_emb\.weight",
            "vision_tower.patch_embed.pos_emb.position_embeddings",
        ),
        (name + r"\.patch_embed\.", "vision_tower.patch_embed."),
        (name + r"\.encoder\.final_layernorm\.", "vision_tower.final_layernorm."),
        (block + "norm0", layer + "norm1"),
        (block + "norm1", layer + "norm2"),
        (block + r"mlp\.fc0", layer + "mlp.fc1"),
        (block + r"mlp\.fc1", layer + "mlp.fc2"),
        (block + "wqkv", layer + "attn.[q|k|v]_proj"),
        (block + "wo", layer + "attn.proj"),
    )


_NAMES: Rules = (
    *_tower("vision_tower"),
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
LOCATE_ANYTHING = CheckpointLayout(_config, (*_tower("vision_model"), (r"mlp1\.", "mm_projector.")))
