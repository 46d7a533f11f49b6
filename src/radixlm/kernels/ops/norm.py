"""Normalisation. Legend: T tokens (any leading dimensions), D channels.

Weights are float32 and already hold the checkpoint's offset (Gemma stores weight - 1); sums are
taken in float32 for any dtype of x.
"""

import torch
from torch import Tensor


def unit_rms(x_TD: Tensor, eps: float) -> Tensor:
    """float32: ``x / rms(x)`` over the last dimension."""
    h = x_TD.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension (arXiv:1910.07467); a new tensor like x."""
    return (unit_rms(x_TD, eps) * weight_D).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x += delta`` in place, then ``rms_norm(x)`` as a new tensor."""
    x_TD += delta_TD
    return rms_norm(x_TD, weight_D, eps)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / std * weight + bias`` over the last dimension; a new tensor like x."""
    h = x_TD.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight_D
    return (h if bias_D is None else h + bias_D).to(x_TD.dtype)


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> Tensor:
    """``x += delta`` in place, then ``layer_norm(x)`` as a new tensor."""
    x_TD += delta_TD
    return layer_norm(x_TD, weight_D, bias_D, eps)
