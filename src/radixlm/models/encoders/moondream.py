"""The encoder of Moondream 2 and 3.

Legend: K crops of an image, P patches of a crop, C channels of the encoder, D of the decoder.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Moondream(nn.Module):
    """SigLIP on the whole image and on overlapping crops, whose middles are put together and
    averaged down to as many places as the whole image has; both are projected side by side."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig  # noqa: PLC0415  (2 s)
        from transformers.models.siglip.modeling_siglip import SiglipEncoder  # noqa: PLC0415

        vision = SiglipVisionConfig(**config["vision_config"])
        vision._attn_implementation = "sdpa"
        size, width = vision.patch_size, vision.hidden_size
        self.patch_emb = nn.Linear(vision.num_channels * size**2, width)
        self.pos_emb = nn.Parameter(torch.zeros((vision.image_size // size) ** 2, width))
        self.encoder = SiglipEncoder(vision)
        self.post_ln = nn.LayerNorm(width, eps=vision.layer_norm_eps)
        inner, self._margin = config["inner"], config["margin"]
        layers = {"fc1": (2 * width, inner), "fc2": (inner, config["hidden_size"])}
        self.proj_mlp = nn.ModuleDict({name: nn.Linear(*one) for name, one in layers.items()})

    def get_image_features(self, pixel_values: Tensor, image_tiles: Tensor) -> Tensor:
        """[crops of all images, P, numbers of a patch], int64 [images, 2] rows and columns of
        crops behind each whole image -> [images * P, D]."""
        rows = self.patch_emb(pixel_values) + self.pos_emb
        seen = self.post_ln(self.encoder(inputs_embeds=rows).last_hidden_state)
        side = math.isqrt(seen.shape[1])
        grids: list[tuple[int, int]] = [(int(h), int(w)) for h, w in image_tiles.tolist()]
        parts = torch.split(seen, [1 + high * wide for high, wide in grids])
        made = []
        for own, grid in zip(parts, grids, strict=True):
            crops = own[1:].reshape(*grid, side, side, -1)
            large = self._joined(crops).permute(2, 0, 1)
            small = nn.functional.adaptive_avg_pool2d(large, side).flatten(1).T
            made.append(torch.cat([own[0], small], -1))
        opened = nn.functional.gelu(self.proj_mlp["fc1"](torch.cat(made)), approximate="tanh")
        projected: Tensor = self.proj_mlp["fc2"](opened)
        return projected

    def _joined(self, crops: Tensor) -> Tensor:
        """[rows, columns, side, side, C] -> [height, width, C] without the margins inside."""
        whole = []
        for row, tiles in enumerate(crops):
            line = [self._cut(tile, 1, at, len(tiles)) for at, tile in enumerate(tiles)]
            whole.append(self._cut(torch.cat(line, 1), 0, row, len(crops)))
        return torch.cat(whole)

    def _cut(self, tile: Tensor, axis: int, at: int, count: int) -> Tensor:
        """Without the margin towards its neighbours."""
        first = self._margin * (at > 0)
        last = tile.shape[axis] - self._margin * (at < count - 1)
        return tile.narrow(axis, first, last - first)
