"""The encoder of GLM-4V (EVA2-CLIP). The parameters have the published names.

Legend: N patches of one image, C channels of the encoder, D of the decoder.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    """Attention and an MLP, each with a norm of what it adds."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, inner, eps = (
            config[k] for k in ("hidden_size", "intermediate_size", "layer_norm_eps")
        )
        self._heads = config["num_heads"]
        self.input_layernorm = nn.LayerNorm(dim, eps)
        self.post_attention_layernorm = nn.LayerNorm(dim, eps)
        parts = {"query_key_value": nn.Linear(dim, 3 * dim), "dense": nn.Linear(dim, dim)}
        self.attention = nn.ModuleDict(parts)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, inner), "fc2": nn.Linear(inner, dim)})

    def forward(self, x: Tensor) -> Tensor:
        """[images, 1 + N, C]."""
        qkv = self.attention["query_key_value"](x).unflatten(-1, (3, self._heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        read = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.input_layernorm(self.attention["dense"](read))
        fed = self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](x)))
        added: Tensor = self.post_attention_layernorm(fed)
        return x + added


class Glm4v(nn.Module):
    """A square of four patches becomes one row; a row of its own begins and ends each image."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vision, dim, inner = (
            config[k] for k in ("vision_config", "hidden_size", "ffn_hidden_size")
        )
        width, size = vision["hidden_size"], vision["patch_size"]
        self._scale = float(vision["scaling_factor"])
        self.patch_embedding = nn.Module()
        self.patch_embedding.proj = nn.Conv2d(vision["in_channels"], width, size, size)
        self.patch_embedding.cls_embedding = nn.Parameter(torch.zeros(1, width))
        places = (vision["image_size"] // size) ** 2 + 1
        self.patch_embedding.position_embedding = nn.Embedding(places, width)
        layers = nn.ModuleList(_Block(vision) for _ in range(vision["num_hidden_layers"]))
        self.transformer = nn.ModuleDict({"layers": layers})
        self.conv = nn.Conv2d(width, dim, 2, 2)
        sizes = {"linear_proj": (dim, dim), "gate_proj": (dim, inner)}
        sizes |= {"dense_h_to_4h": (dim, inner), "dense_4h_to_h": (inner, dim)}
        parts = {name: nn.Linear(*one, bias=False) for name, one in sizes.items()}
        self.linear_proj = nn.ModuleDict({**parts, "norm1": nn.LayerNorm(dim)})
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, dim)) for _ in range(2))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """[images, 3, side, side] -> [images * (N / 4 + 2), D]."""
        embed: Any = self.patch_embedding
        patches = embed.proj(pixel_values).flatten(2).transpose(1, 2)
        first = embed.cls_embedding.expand(len(patches), 1, -1)
        x = torch.cat([first, patches], 1) + embed.position_embedding.weight
        blocks: Any = self.transformer["layers"]
        for block in blocks:
            x = block(x)
        side, parts = math.isqrt(x.shape[1] - 1), self.linear_proj
        grid = self.conv(x[:, 1:].transpose(1, 2).unflatten(2, (side, side)))
        h = parts["linear_proj"](grid.flatten(2).transpose(1, 2))
        h = nn.functional.gelu(parts["norm1"](h))
        h = nn.functional.silu(parts["gate_proj"](h)) * parts["dense_h_to_4h"](h)
        ends = [one.expand(len(h), 1, -1) for one in (self.boi, self.eoi)]
        whole = torch.cat([ends[0], parts["dense_4h_to_h"](h), ends[1]], 1) / self._scale
        return whole.flatten(0, 1)
