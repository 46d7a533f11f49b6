"""The encoder of Molmo. The parameters have the published names.

Legend: K crops of an image, P patches of a crop, C channels of the encoder, D of the decoder.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _Attention(nn.Module):
    """Attention of some rows to others."""

    def __init__(self, width: int, heads: int, num_layers: int = 1) -> None:
        super().__init__()
        self._heads = heads
        wide = num_layers * width
        self.wq, self.wk, self.wv = (nn.Linear(wide, width) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, asking: Tensor, read: Tensor) -> Tensor:
        """[B, N, channels] and [B, M, channels] -> [B, N, C]."""
        parts = (self.wq(asking), self.wk(read), self.wv(read))
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(1, 2) for one in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.wo(seen.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    """A layer of CLIP."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner, eps = config["width"], config["inner"], config["eps"]
        self.attention = _Attention(width, config["heads"])
        layers = {"w1": nn.Linear(width, inner), "w2": nn.Linear(inner, width)}
        self.feed_forward = nn.ModuleDict(layers)
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(width, eps=eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        x = x + self.attention(h, h)
        h = self.feed_forward["w1"](self.ffn_norm(x))
        fed: Tensor = self.feed_forward["w2"](h * torch.sigmoid(1.702 * h))
        return x + fed


class _Clip(nn.Module):
    """CLIP on crops of one size; the outputs of two of its layers, side by side."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, patch, self._read = config["width"], config["patch"], config["layers"]
        count = (config["side"] // patch) ** 2
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(1 + count, width))
        self.patch_embedding = nn.Linear(3 * patch**2, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=config["eps"])
        blocks = nn.ModuleList(_Block(config) for _ in range(max(self._read)))
        self.transformer = nn.ModuleDict({"resblocks": blocks})

    def forward(self, crops: Tensor) -> Tensor:
        """[K, P, numbers of a patch] -> [K, P, 2 C]."""
        rows = self.patch_embedding(crops)
        first = self.class_embedding.expand(len(rows), 1, -1)
        x = self.pre_ln(torch.cat([first, rows], 1) + self.positional_embedding)
        kept = []
        blocks: Any = self.transformer["resblocks"]
        for number, block in enumerate(blocks, 1):
            x = block(x)
            if number in self._read:
                kept.append(x[:, 1:])
        return torch.cat(kept[::-1], -1)


class Molmo(nn.Module):
    """CLIP, whose patches are pooled by squares of four: their mean attends to them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner, dim = config["width"], config["projector_inner"], config["hidden_size"]
        self._side = config["side"] // config["patch"] // 2
        self.image_vit = _Clip(config)
        self.pad_embed = nn.Parameter(torch.zeros(2, 2 * width))
        self.image_pooling_2d = _Attention(width, config["heads"], num_layers=2)
        sizes = {"w1": (width, inner), "w2": (inner, dim), "w3": (width, inner)}
        layers = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        self.image_projector = nn.ModuleDict(layers)

    def get_image_features(
        self, pixel_values: Tensor, image_masks: Tensor, image_places: Tensor, image_crops: Tensor
    ) -> Tensor:
        """[crops of all images, P, numbers of a patch], float [crops, P]: the share of a patch that
        is no margin, int64 [crops, squares]: its place among the image's rows or -1, int64
        [images] -> [N, D]."""
        seen = self.image_vit(pixel_values)
        empty = image_masks == 0
        partial = (image_masks < 1) & ~empty
        for marked, row in zip((empty, partial), self.pad_embed, strict=True):
            seen = seen + row * marked[..., None]
        side = self._side
        grid = seen.reshape(len(seen), side, 2, side, 2, -1).transpose(2, 3)
        squares = grid.reshape(len(seen) * side * side, 4, -1)
        pooled = self.image_pooling_2d(squares.mean(1, keepdim=True), squares)[:, 0]
        parts = self.image_projector
        opened = nn.functional.silu(parts["w1"](pooled)) * parts["w3"](pooled)
        rows = parts["w2"](opened).unflatten(0, (len(seen), -1))
        made = []
        counts = image_crops.tolist()
        parted = (torch.split(one, counts) for one in (rows, image_places))
        for own, places in zip(*parted, strict=True):
            order = places[places >= 0].argsort()
            made.append(own[places >= 0][order])
        return torch.cat(made)
