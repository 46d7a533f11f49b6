"""Weights that stay quantized as the checkpoint has them. Legend: O outputs, I inputs, G groups."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.linear import GatherLinear, PackedLinear
from radixlm.kernels.ops.quantized import QuantScales
from radixlm.kernels.packing import noted
from radixlm.quant.param import Param, Shard
from radixlm.quant.quantized_weight import GROUPS, QuantizedWeight, kernel_group_size
from radixlm.quant.scheme import Scheme


class PrequantizedScheme(Scheme):
    """Weights that the checkpoint stores as integers keep their values, scales and offsets; all
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
        quantized, param.quantized = param.quantized, None
        if quantized is None:
            return super().pack(kernels, params, gate_act)
        bias = params["bias"].take() if "bias" in params else None
        weight = to_kernel_weight(quantized)
        if gate_act:
            packed = kernels.pack_gated(weight.values, bias, weight.fmt, gate_act, weight.scales)
        else:
            packed = kernels.pack_linear(weight.values, bias, weight.fmt, weight.scales)
        if weight.index_J is None:
            return packed
        return GatherLinear(packed, weight.index_J, param.shape[1])


class KernelWeight(Record):
    """A quantized weight as kernels take it: see ``pack_linear`` in kernels/ops/linear.py. Column j
    belongs to input ``index_J[j]``, without an index to input j."""

    values: Tensor
    fmt: str
    scales: QuantScales
    index_J: Tensor | None = None


def to_kernel_weight(weight: QuantizedWeight) -> KernelWeight:
    """Values and codes of 4 bits stay as they are. 8 bit values become int8 if rows have one scale
    and zero points leave them in range, else two columns of 4 bits each."""
    return noted(partial(_to_kernel_weight, weight))


def _to_kernel_weight(weight: QuantizedWeight) -> KernelWeight:
    if weight.is_fp4:
        return KernelWeight(weight.values_OI, f"fp4-{weight.group_size}", (weight.scale_OG, None))
    if weight.bits == 4:
        return _from_4bit(weight)
    rows = to_int8_rows(weight)
    if rows is not None and weight.order_I is None:
        return rows
    weight = weight.with_group_size(kernel_group_size(weight.group_size))
    num_in = weight.values_OI.shape[1]
    order = weight.order_I
    if order is None:
        order = torch.arange(num_in, device=weight.values_OI.device)
    high_and_low = QuantizedWeight(
        torch.cat((weight.values_OI >> 4, weight.values_OI & 15), 1),
        torch.cat((16 * weight.scale_OG, weight.scale_OG), 1),
        torch.cat((weight.offset_OG, torch.zeros_like(weight.offset_OG)), 1),
        order_I=torch.cat((order, order)),
    )
    return _from_4bit(high_and_low)


def _from_4bit(weight: QuantizedWeight) -> KernelWeight:
    group_size = kernel_group_size(weight.group_size)
    weight = weight.with_group_size(group_size)
    scales = weight.scale_OG, weight.offset_OG
    return KernelWeight(weight.values_OI, f"w4a8-{group_size}", scales, weight.order_I)


def to_int8_rows(weight: QuantizedWeight) -> KernelWeight | None:
    """8 bit values as int8 around their zero points; None if they do not fit or rows have several
    scales. [E, O, I] too."""
    if weight.bits != 8 or weight.scale_OG.shape[-1] != 1:
        return None
    scale = weight.scale_OG[..., 0]
    if not weight.is_asymmetric:
        values = (weight.values_OI ^ 128).view(torch.int8)
    else:
        zero = torch.where(scale == 0, 128.0, -weight.offset_OG[..., 0] / scale).round()
        signed = weight.values_OI - zero.to(torch.int16)[..., None]
        if int(signed.min()) < -128 or int(signed.max()) > 127:
            return None
        values = signed.to(torch.int8)
    return KernelWeight(values, "w8a8" if weight.quantizes_inputs else "int8wo", (scale, None))
