"""Linear maps y = x W^T + b as objects, so that an implementation may store W in its own layout.
Legend: T tokens, I inputs, O outputs."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit, activate_gated
from radixlm.kernels.ops.embedding import embedding
from radixlm.kernels.ops.fp8 import ReferenceFp8
from radixlm.kernels.ops.quantized import DequantLinear, QuantScales, ReferenceQuantized


class PackedLinear(Protocol):
    """A linear map ready to run. ``out_features`` is the O of ``run``'s result."""

    out_features: int

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x, accumulated in float32 at least."""

    def unpack(self) -> Tensor:
        """The weight [O, I] in the checkpoint's dtype (for saving and weight queries)."""


class ReferenceLinear:
    """Keeps W as it is; if its dtype differs from that of x it is converted on every call."""

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


def pack_linear(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, scales: QuantScales | None = None
) -> PackedLinear:
    """An object whose ``run`` is the map. ``fmt`` is "" (the weight's own dtype; the reference
    packs nothing) or a format of ``ops/quantized`` or ``ops/fp8``. With ``scales``, ``weight_OI``
    holds a checkpoint's integers: uint8 values 0..15 of a 4 bit format, or int8 of an 8 bit one."""
    if scales is not None:
        return ReferenceQuantized(weight_OI, bias_O, fmt, scales)
    if fmt:
        return _quantized(weight_OI, bias_O, fmt)
    return ReferenceLinear(weight_OI, bias_O)


def _quantized(weight_OI: Tensor, bias_O: Tensor | None, fmt: str) -> DequantLinear:
    packed = ReferenceFp8 if fmt in ReferenceFp8.formats else ReferenceQuantized
    return packed(weight_OI, bias_O, fmt)


class Gated:
    """``act(gate) * up`` after a linear map that gives [gate, up]."""

    def __init__(self, inner: PackedLinear, act: str, limit: GateLimit = NO_LIMIT) -> None:
        self.inner, self._act, self._limit = inner, act, limit
        self.out_features = inner.out_features // 2

    def run(self, x_TI: Tensor) -> Tensor:
        return activate_gated(self.inner.run(x_TI), self._act, *self._limit)

    def run_changed(self, x_TI: Tensor, change: Callable[[Tensor], None]) -> Tensor:
        """As ``run``, with ``change`` called on [gate, up] before the activation."""
        h_T2O = self.inner.run(x_TI)
        change(h_T2O)
        return activate_gated(h_T2O, self._act, *self._limit)

    def unpack(self) -> Tensor:
        return self.inner.unpack()


def pack_gated(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, act: str, scales: QuantScales | None = None
) -> PackedLinear:
    """The front of a gated MLP: ``run`` gives act(gate) * up, [T, O / 2]; gate's rows first.
    ``scales`` as in ``pack_linear``."""
    return Gated(pack_linear(weight_OI, bias_O, fmt, scales), act)


class GatherLinear:
    """A linear map whose column j reads input ``index_J[j]`` (J columns). Columns that read the
    same input add up."""

    def __init__(self, inner: PackedLinear, index_J: Tensor, num_in: int) -> None:
        self.inner, self.index_J, self._num_in = inner, index_J, num_in
        self.out_features = inner.out_features

    def run(self, x_TI: Tensor) -> Tensor:
        return self.inner.run(x_TI.index_select(-1, self.index_J))

    def unpack(self) -> Tensor:
        weight_OJ = self.inner.unpack()
        weight_OI = weight_OJ.new_zeros(weight_OJ.shape[0], self._num_in)
        return weight_OI.index_add_(1, self.index_J.to(weight_OJ.device), weight_OJ)


class TiedTable(Protocol):
    """One matrix that is both the token table and the output head."""

    def run(self, x_TI: Tensor) -> Tensor:
        """Logits [T, V] in the dtype of x."""

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` times ``scale``, as ``embedding`` gives them."""

    def unpack(self) -> Tensor:
        """The table [V, D] again."""


class ReferenceTied(ReferenceLinear):
    """The table as it is."""

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return embedding(ids_T, self.weight_OI, scale, dtype)


def pack_tied(table_VD: Tensor, fmt: str = "") -> TiedTable:
    """An object that looks rows up and projects to the vocabulary from one copy of the table."""
    return _quantized(table_VD, None, fmt) if fmt else ReferenceTied(table_VD, None)


class HeadLinear(Protocol):
    """One linear map a head: y[:, h] = x[:, h] W[h]^T."""

    def run(self, x_THI: Tensor) -> Tensor:
        """[T, H, O] in the dtype of x."""


class ReferenceHeadLinear:
    """All heads in one batched product."""

    def __init__(self, weight_HOI: Tensor) -> None:
        self.weight_HIO = weight_HOI.transpose(1, 2)

    def run(self, x_THI: Tensor) -> Tensor:
        weight = self.weight_HIO.to(x_THI.dtype)
        return torch.bmm(x_THI.transpose(0, 1), weight).transpose(0, 1)


def pack_head_linear(weight_HOI: Tensor) -> HeadLinear:
    """An object whose ``run`` maps every head by its own weight."""
    return ReferenceHeadLinear(weight_HOI)
