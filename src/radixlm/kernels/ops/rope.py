"""Rotary position embedding (arXiv:2104.09864). Legend: T tokens, H heads, D head dim,
R = half the number of rotated channels."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> None:
    """Rotate the first 2R channels of every head in place; x may be a strided view.

    Pairs are (i, i + R), or (2i, 2i + 1) when ``interleaved``. cos and sin are float32 and hold
    the attention factor of yarn and longrope.
    """
    half = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    turned = x_THD[..., : 2 * half]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    a.copy_(rotated_a)
    b.copy_(rotated_b)


def rope_angles(positions_T: Tensor, inv_freq_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R], float32, of position * inv_freq, times ``factor``."""
    angles_TR = positions_T[:, None].float() * inv_freq_R[None]
    return torch.cos(angles_TR) * factor, torch.sin(angles_TR) * factor
