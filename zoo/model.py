"""The Qwen3 architecture in plain torch, for training: packed rows, stacked weights.

Shapes: B rows, L tokens a row, D hidden, H query heads, K key heads, E head dim, V vocabulary,
N layers. Every matrix of the stack is one tensor [N, out, in], so that the optimizer can treat
all layers in one batched product. `export` writes the Hugging Face layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
VECTORS = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


BLOCK = 128  # queries


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model."""

    vocab: int = 2048
    hidden: int = 256
    inner: int = 704
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 4096
    theta: float = 10000.0


BASE = Shape()
DRAFT = Shape(hidden=128, inner=320, layers=2, heads=4, kv_heads=1, head_dim=32)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def rotary(num_positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin tables, each [num_positions, head_dim] (two equal halves)."""
    rates = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHLE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    """Apply the rotary embedding to heads-first queries or keys."""
    left, right = x_BHLE.float().chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return (x_BHLE.float() * cos_LE + turned * sin_LE).to(x_BHLE.dtype)


class Tiny(nn.Module):
    """A Qwen3 decoder with stacked layer weights and a tied embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        sizes = {
            "q": (q, s.hidden),
            "k": (kv, s.hidden),
            "v": (kv, s.hidden),
            "o": (s.hidden, q),
            "gate": (s.inner, s.hidden),
            "up": (s.inner, s.hidden),
            "down": (s.hidden, s.inner),
        }
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.02)
        self.matrix = nn.ParameterDict(
            {
                name: nn.Parameter(
                    torch.randn(s.layers, *size)
                    * (size[1] ** -0.5)
                    * (0.2 if name in ("o", "down") else 0.6)
                )
                for name, size in sizes.items()
            }
        )
        widths = {"norm1": s.hidden, "norm2": s.hidden, "q_norm": s.head_dim, "k_norm": s.head_dim}
        self.vector = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(s.layers, width)) for name, width in widths.items()}
        )
        self.norm = nn.Parameter(torch.ones(s.hidden))
        cos, sin = rotary(s.context, s.head_dim, s.theta)
        self.attend = attend_causal
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def layer_weights(self, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """The weights of every layer by name; the matrices in `dtype`, cast once a step."""
        parts = {name: w.to(dtype).unbind(0) for name, w in self.matrix.items()}
        parts |= {name: w.unbind(0) for name, w in self.vector.items()}
        return [{name: w[i] for name, w in parts.items()} for i in range(self.shape.layers)]

    def forward(
        self,
        ids_BL: Tensor,
        bias_B1LL: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Final normed hidden states [B, L, D] of packed rows; the bias is 0 or -inf.

        `outputs` receives the residual stream behind every layer.
        """
        length = ids_BL.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(ids_BL, self.embed)
        for weights in self.layer_weights(dtype):
            x = self.layer(x, weights, bias_B1LL, cos, sin, dtype)
            if outputs is not None:
                outputs.append(x)
        return rms_norm(x, self.norm).to(dtype)

    def project(
        self, x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,H,L,E], keys and values [B,K,L,E] of one layer."""
        s = self.shape
        h = rms_norm(x, w["norm1"]).to(dtype)
        q = F.linear(h, w["q"]).unflatten(-1, (s.heads, s.head_dim)).transpose(1, 2)
        k = F.linear(h, w["k"]).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        v = F.linear(h, w["v"]).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        q = rotate(rms_norm(q, w["q_norm"]), cos, sin)
        k = rotate(rms_norm(k, w["k_norm"]), cos, sin)
        return q, k, v

    def finish(self, x: Tensor, heads: Tensor, w: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Output projection and feed-forward of one layer; heads is [B,H,L,E]."""
        x = x + F.linear(heads.transpose(1, 2).flatten(2), w["o"])
        h = rms_norm(x, w["norm2"]).to(dtype)
        return x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])

    def layer(
        self,
        x: Tensor,
        w: dict[str, Tensor],
        bias: Tensor,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """One decoder layer over packed rows."""
        q, k, v = self.project(x, w, cos, sin, dtype)
        return self.finish(x, self.attend(q, k, v, bias), w, dtype)

    def compile_parts(self) -> None:
        """Compile the parts of a layer, once for all layers.

        The layer as one region gives NaN gradients of the keys with torch 2.13 on a CPU.
        """
        self.project = torch.compile(self.project, dynamic=False)  # type: ignore[method-assign]
        self.finish = torch.compile(self.finish, dynamic=False)  # type: ignore[method-assign]
        self.attend = torch.compile(attend_causal, dynamic=False)

    def plain_parts(self) -> None:
        """Undo `compile_parts`, for shapes that vary."""
        for name in ("project", "finish"):
            self.__dict__.pop(name, None)
        self.attend = attend_causal


def attend(q_BHLE: Tensor, k_BKME: Tensor, v_BKME: Tensor, bias: Tensor) -> Tensor:
    """Grouped-query attention as two batched products: quick on a CPU's bf16 units."""
    batch, heads, length, width = q_BHLE.shape
    groups = k_BKME.shape[1]
    q = q_BHLE.reshape(batch, groups, (heads // groups) * length, width)
    scores = (q @ k_BKME.transpose(-1, -2)).view(batch, groups, heads // groups, length, -1)
    scores = scores.float() * width**-0.5 + bias.unsqueeze(1)
    probs = scores.softmax(-1).to(v_BKME.dtype).view(batch, groups, -1, k_BKME.shape[2])
    return (probs @ v_BKME).view(batch, heads, length, width)


def attend_causal(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, bias: Tensor) -> Tensor:
    """`attend` where the bias lets no token look ahead: a block of queries skips all later keys.

    That is a third to a half less work, and the scores of a block stay in the cache.
    """
    parts = []
    for begin in range(0, q_BHLE.shape[2], BLOCK):
        end = begin + BLOCK
        keys, values = k_BKLE[:, :, :end], v_BKLE[:, :, :end]
        parts.append(attend(q_BHLE[:, :, begin:end], keys, values, bias[:, :, begin:end, :end]))
    return torch.cat(parts, 2)
