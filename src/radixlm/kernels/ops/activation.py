"""Activation functions. Legend: T tokens, I inner channels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

OAI_LIMIT = 7.0  # gpt-oss clamps gate and up
OAI_ALPHA = 1.702


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_quick": _gelu_quick,
    "relu": F.relu,
    "relu2": _relu2,
    "tanh": torch.tanh,
}


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, a new contiguous tensor. A separate op because torch's rounds an
    element differently near the end of a tensor, so that a token would depend on its batch."""
    return torch.sigmoid(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, a new contiguous tensor."""
    return torch.tanh(x / cap) * cap


def activate(x_TI: Tensor, act: str) -> Tensor:
    """``act(x)``, a new tensor like x."""
    return POINTWISE[act](x_TI)


def activate_gated(x_T2I: Tensor, act: str) -> Tensor:
    """``act(gate) * up`` where gate is the first half of the channels; [T, I].

    "swiglu_oai" clamps both halves and computes (up + 1) * gate * sigmoid(1.702 * gate).
    """
    gate, up = x_T2I.chunk(2, -1)
    if act == "swiglu_oai":
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * OAI_ALPHA)
    return POINTWISE[act](gate) * up
