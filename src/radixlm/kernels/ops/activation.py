"""Activation functions. Legend: T tokens, I inner channels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

OAI_LIMIT = 7.0  # gpt-oss clamps gate and up

GateLimit = tuple[float, bool]  # the ``limit`` and ``cuts_after`` of a gated activation
NO_LIMIT: GateLimit = (0.0, False)
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
    """``1 / (1 + exp(-x))``, a new contiguous tensor. On a CPU torch's own rounds an element
    differently near the end of a tensor, so that a token would depend on its batch; so do its silu
    and softplus."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype) if x.is_cpu else torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return (x / (1 + torch.exp(-x.float()))).to(x.dtype) if x.is_cpu else F.silu(x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x))) if x.is_cpu else F.softplus(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, a new contiguous tensor."""
    return torch.tanh(x / cap) * cap


def activate(x_TI: Tensor, act: str) -> Tensor:
    """``act(x)``, a new tensor like x."""
    return POINTWISE[act](x_TI)


def activate_gated(x_T2I: Tensor, act: str, limit: float = 0.0, cuts_after: bool = False) -> Tensor:
    """``act(gate) * up`` where gate is the first half of the channels; [T, I].

    A ``limit`` (0: none) cuts the gate above, ``cuts_after`` its activation; up on both sides.
    "swiglu_oai" has one of 7 unless given and computes (up + 1) * gate * sigmoid(1.702 * gate).
    """
    gate, up = x_T2I.chunk(2, -1)
    limit = limit or (OAI_LIMIT if act == "swiglu_oai" else 0.0)
    if limit:
        gate, up = gate if cuts_after else gate.clamp(max=limit), up.clamp(-limit, limit)
    if act == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(gate * OAI_ALPHA)
    opened = POINTWISE[act](gate)
    return (opened.clamp(max=limit) if limit and cuts_after else opened) * up
