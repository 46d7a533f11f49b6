"""MoonViT, the encoder of Kimi-VL and LocateAnything: patches of images -> rows for the text
model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Kimi(nn.Module):
    """MoonViT as in Kimi K2.5, which rotates the halves of a head; the published weights are for
    interleaved RoPE, so the rows of queries and keys are permuted as they load."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers.models.kimi_k25 import modeling_kimi_k25 as hf  # noqa: PLC0415 (2 s)

        whole = hf.Kimi_K25Config(
            vision_config=config["vision_config"],
            text_config={"model_type": "llama", "hidden_size": config["hidden_size"]},
            projection_hidden_size=config["projection_hidden_size"],
        )
        whole.vision_config._attn_implementation = "sdpa"
        self.vision_tower = hf.Kimi_K25VisionModel(whole.vision_config)
        self.mm_projector = hf.Kimi_K25MultimodalProjection(whole)
        self._num_heads = whole.vision_config.num_attention_heads

    def _load_from_state_dict(self, state: dict[str, Tensor], *args: Any) -> None:
        """Called before the same method of the submodules."""
        for name, rows in state.items():
            if ".attn.q_proj." in name or ".attn.k_proj." in name:
                heads = rows.reshape(self._num_heads, -1, 2, *rows.shape[1:])
                state[name] = heads.transpose(1, 2).reshape(rows.shape)
        super()._load_from_state_dict(state, *args)

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """[patches of all images, 3, P, P], int64 [images, 3] -> [N, D]."""
        encoded = self.vision_tower(pixel_values, grid_thw=image_grid_thw)
        rows: Tensor = self.mm_projector(encoded.pooler_output).squeeze(1)
        return rows


class LocateAnything(Kimi):
    """A square of patches is normed as one row, and projected."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        width = self.mm_projector.in_proj.in_features
        self.mm_projector = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, config["hidden_size"]),
            nn.GELU(),
            nn.Linear(config["hidden_size"], config["hidden_size"]),
        )

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """As ``Kimi``'s."""
        encoded = self.vision_tower(pixel_values, grid_thw=image_grid_thw)
        rows: Tensor = self.mm_projector(encoded.pooler_output.flatten(1))
        return rows
