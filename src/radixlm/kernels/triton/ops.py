"""Registers the Triton kernels for the ops of ``kernels/ops``: on GPUs, and on the CPU, where they
are interpreted if named (``--kernel all=triton``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixlm.kernels.dispatch import implements
from radixlm.kernels.ops import norm as reference
from radixlm.kernels.triton import activation, embedding, norm, rope
from radixlm.kernels.triton.mode import interpreting

NAME = "triton"


def register_triton(op: str, function: Any) -> None:
    """Make ``function`` the implementation of ``op`` wherever kernels of this process run."""
    implements(op, name=NAME, device="cuda")(function)
    if interpreting():
        implements(op, name=NAME, device="cpu", is_default=False)(function)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not norm.takes(x_TD, weight_D):
        return reference.rms_norm(x_TD, weight_D, eps)
    return norm.norm(x_TD, weight_D, None, eps, False)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not (norm.takes(x_TD, weight_D) and _joins(x_TD, delta_TD)):
        return reference.add_rms_norm(x_TD, delta_TD, weight_D, eps)
    return norm.norm(x_TD, weight_D, None, eps, False, delta_TD)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not norm.takes(x_TD, weight_D, bias_D):
        return reference.layer_norm(x_TD, weight_D, bias_D, eps)
    return norm.norm(x_TD, weight_D, bias_D, eps, True)


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> Tensor:
    """See kernels/ops/norm.py."""
    if not (norm.takes(x_TD, weight_D, bias_D) and _joins(x_TD, delta_TD)):
        return reference.add_layer_norm(x_TD, delta_TD, weight_D, bias_D, eps)
    return norm.norm(x_TD, weight_D, bias_D, eps, True, delta_TD)


def _joins(x: Tensor, delta: Tensor) -> bool:
    return delta.shape == x.shape and (delta.dtype == x.dtype or x.dtype == torch.float32)


for _op, _function in {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
    "add_layer_norm": add_layer_norm,
    "rope": rope.rope,
    "prepare_qk": rope.prepare_qk,
    "sigmoid": activation.sigmoid,
    "softcap": activation.softcap,
    "activate": activation.activate,
    "activate_gated": activation.activate_gated,
    "embedding": embedding.embedding,
}.items():
    register_triton(_op, _function)
