"""Linear maps y = x W^T + b behind an object, so that an implementation may keep W in its own
layout. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class PackedLinear(Protocol):
    """A linear map ready to run. ``out_features`` is the O of ``run``'s result."""

    out_features: int

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x, accumulated in float32 at least."""
        ...

    def unpack(self) -> Tensor:
        """The weight [O, I] again, in the checkpoint's dtype (for savers and weight queries)."""
        ...


class ReferenceLinear:
    """Keeps W as it is; a W of another dtype than x is widened on every call."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.out_features = int(weight_OI.shape[0])

    def run(self, x_TI: Tensor) -> Tensor:
        weight, bias, dtype = self.weight_OI, self.bias_O, x_TI.dtype
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return F.linear(x_TI, weight, bias)

    def unpack(self) -> Tensor:
        return self.weight_OI


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None, fmt: str) -> PackedLinear:
    """An object whose ``run`` is the map. ``fmt`` is "" (the weight's own dtype) or a name of a
    quantised format that an implementation knows; the reference packs nothing."""
    if fmt:
        raise ValueError(f"the reference linear has no format {fmt!r}")
    return ReferenceLinear(weight_OI, bias_O)
