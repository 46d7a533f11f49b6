"""Rotary position embedding (arXiv:2104.09864), and the norms of q and k before attention.

Legend: T tokens, H query heads, K KV heads, D head dim, R half the number of rotated channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.ops.norm import layer_norm, rms_norm


class QkNorm(Record):
    """Norms of q and k. "head": all heads share weights [D]; "each": weights [H, D], every head
    normalised alone; "row": the whole projection [H * D] at once. Weights are float32."""

    kind: Literal["head", "each", "row"]
    is_layer_norm: bool
    eps: float
    q_weight: Tensor
    k_weight: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


def rope(x_THD: Tensor, cos_sin_T2R: Tensor, interleaved: bool) -> None:
    """Rotate the first 2R channels of every head in place; x may be a strided view.

    Pairs are (i, i + R), or (2i, 2i + 1) when ``interleaved``. ``cos_sin`` is float32, R cosines
    then R sines of each token, times the attention factor of yarn and longrope.
    """
    half = cos_sin_T2R.shape[-1] // 2
    cos, sin = cos_sin_T2R[:, None, :half], cos_sin_T2R[:, None, half:]
    rotary = x_THD[..., : 2 * half]
    if interleaved:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
    else:
        a, b = rotary[..., :half], rotary[..., half:]
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    a.copy_(rotated_a)
    b.copy_(rotated_b)


def rope_angles(positions_T: Tensor, inv_freq_R: Tensor, factor: float) -> Tensor:
    """R cosines, then R sines, [T, 2R] float32, of position * inv_freq, times ``factor``."""
    angles_TR = positions_T[:, None].float() * inv_freq_R
    return torch.cat((torch.cos(angles_TR), torch.sin(angles_TR)), -1) * factor


def prepare_qk(
    q_THD: Tensor,
    k_TKD: Tensor,
    norm: QkNorm | None,
    cos_sin_T2R: Tensor | None,
    interleaved: bool,
) -> None:
    """Normalise, then rotate q and k in place; they may be views of one qkv row."""
    if norm is not None:
        for x, weight, bias in (
            (q_THD, norm.q_weight, norm.q_bias),
            (k_TKD, norm.k_weight, norm.k_bias),
        ):
            rows = x.flatten(1) if norm.kind == "row" else x
            if norm.is_layer_norm:
                normed = layer_norm(rows, weight, bias, norm.eps)
            else:
                normed = rms_norm(rows, weight, norm.eps)
            x.copy_(normed.view(x.shape))
    if cos_sin_T2R is not None:
        rope(q_THD, cos_sin_T2R, interleaved)
        rope(k_TKD, cos_sin_T2R, interleaved)
