"""Weights that keep the few bits of their checkpoint. Legend: O outputs, I inputs, G groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.given import QuantScales
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.kernels.ops.picked import GatherLinear
from radixlm.quant.param import Param, Shard
from radixlm.quant.quantized_weight import GROUPS, QuantizedWeight, kernel_group_size
from radixlm.quant.scheme import UnquantizedScheme


class PrequantizedScheme(UnquantizedScheme):
    """Weights that the checkpoint has as whole numbers with scales and offsets keep these; all
    others are floats."""

    def params(
        self, out_features: int, in_features: int, bias: bool, shard: Shard | None
    ) -> dict[str, Param]:
        params = super().params(out_features, in_features, bias, shard)
        params["weight"].accepts_quantized = self.accepts_quantized(in_features)
        return params

    def accepts_quantized(self, in_features: int) -> bool:
        return in_features % min(GROUPS) == 0

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        param = params["weight"]
        grid, param.quantized = param.quantized, None
        if grid is None:
            return super().pack(kernels, params, gate_act)
        num_in = grid.values_OI.shape[1]
        bias = params["bias"].take() if "bias" in params else None
        whole = to_kernel_weight(grid)
        if gate_act:
            packed = kernels.pack_gated(whole.values, bias, whole.fmt, gate_act, whole.scales)
        else:
            packed = kernels.pack_linear(whole.values, bias, whole.fmt, whole.scales)
        if whole.index_J is None:
            return packed
        return GatherLinear(packed, whole.index_J, num_in)


class KernelWeight(Record):
    """A grid as kernels take it: see ``pack_linear`` in kernels/ops/linear.py. Column j belongs to
    input ``index_J[j]``, without an index to input j."""

    values: Tensor
    fmt: str
    scales: QuantScales
    index_J: Tensor | None = None


def to_kernel_weight(grid: QuantizedWeight) -> KernelWeight:
    """4 bits as they are; 8 bits as int8 where rows have one scale and zero points that leave them
    such, else as two columns of 4 bits each."""
    if grid.bits == 4:
        return _of_four_bits(grid)
    rows = to_int8_rows(grid)
    if rows is not None and grid.order_I is None:
        return rows
    grid = grid.with_group_size(kernel_group_size(grid.group))
    num_in = grid.values_OI.shape[1]
    order = grid.order_I
    if order is None:
        order = torch.arange(num_in, device=grid.values_OI.device)
    high_and_low = QuantizedWeight(
        torch.cat((grid.values_OI >> 4, grid.values_OI & 15), 1),
        torch.cat((16 * grid.scale_OG, grid.scale_OG), 1),
        torch.cat((grid.offset_OG, torch.zeros_like(grid.offset_OG)), 1),
        order_I=torch.cat((order, order)),
    )
    return _of_four_bits(high_and_low)


def _of_four_bits(grid: QuantizedWeight) -> KernelWeight:
    group = kernel_group_size(grid.group)
    grid = grid.with_group_size(group)
    scales = grid.scale_OG, grid.offset_OG
    return KernelWeight(grid.values_OI, f"w4a8-{group}", scales, grid.order_I)


def to_int8_rows(grid: QuantizedWeight) -> KernelWeight | None:
    """Values of 8 bits as signed ones around their zero points; None where they do not fit or rows
    have several scales. [E, O, I] too."""
    if grid.bits != 8 or grid.scale_OG.shape[-1] != 1:
        return None
    scale = grid.scale_OG[..., 0]
    if not grid.is_asymmetric:
        values = (grid.values_OI ^ 128).view(torch.int8)
    else:
        zero = torch.where(scale == 0, 128.0, -grid.offset_OG[..., 0] / scale).round()
        whole = grid.values_OI - zero.to(torch.int16)[..., None]
        if int(whole.min()) < -128 or int(whole.max()) > 127:
            return None
        values = whole.to(torch.int8)
    return KernelWeight(values, "w8a8" if grid.rounds_inputs else "int8wo", (scale, None))
