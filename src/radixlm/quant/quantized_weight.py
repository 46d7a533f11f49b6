"""QuantizedWeight: an integer weight as a checkpoint stores it. Legend: O outputs, I inputs, G
groups, E experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from radixlm.base.record import Record, replace
from radixlm.kernels.ops.quantized import fp4_values

GROUPS = (128, 64, 32)  # numbers of inputs that share a scale in the kernels


class QuantizedWeight(Record):
    """weight = value * scale + offset, with a scale and an offset for each group of inputs.
    ``values_OI`` (uint8) are 0..15, of 8 ``bits`` 0..255; scales and offsets float32. Column j
    belongs to input ``order_I[j]`` (GPTQ's act-order), without an order to input j.
    ``quantizes_inputs``: the checkpoint was made for activations in 8 bits. Stacked experts have an
    axis of experts in front, and no order. ``is_fp4``: values are codes of e2m1, offsets are 0."""

    values_OI: Tensor
    scale_OG: Tensor
    offset_OG: Tensor
    bits: int = 4
    quantizes_inputs: bool = False
    order_I: Tensor | None = None
    is_fp4: bool = False

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values_OI.shape[-1] // self.scale_OG.shape[-1]

    def dequantize(self) -> Tensor:
        """float32 [O, I]."""
        values = fp4_values(self.values_OI) if self.is_fp4 else self.values_OI
        grouped = values.view(*self.scale_OG.shape, -1) * self.scale_OG[..., None]
        wide = (grouped + self.offset_OG[..., None]).flatten(-2)
        if self.order_I is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.order_I, wide)

    def with_group_size(self, group_size: int) -> QuantizedWeight:
        """The same weight with smaller groups; ``group_size`` divides the present one."""
        if group_size == self.group_size:
            return self
        times = self.group_size // group_size
        scale, offset = (t.repeat_interleave(times, -1) for t in (self.scale_OG, self.offset_OG))
        return replace(self, scale_OG=scale, offset_OG=offset)

    def part(self, take: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The outputs (or experts) that ``take`` keeps of a tensor."""
        values, scale, offset = map(take, (self.values_OI, self.scale_OG, self.offset_OG))
        return replace(self, values_OI=values, scale_OG=scale, offset_OG=offset)

    def to(self, device: torch.device) -> QuantizedWeight:
        """A copy on ``device``."""
        order = None if self.order_I is None else self.order_I.to(device)
        values, scale, offset = (
            t.to(device) for t in (self.values_OI, self.scale_OG, self.offset_OG)
        )
        return replace(self, values_OI=values, scale_OG=scale, offset_OG=offset, order_I=order)

    @property
    def is_asymmetric(self) -> bool:
        """Whether zero points differ from the middle of the range, 8 or 128."""
        middle = float(1 << (self.bits - 1))
        return not torch.equal(self.offset_OG, -middle * self.scale_OG)

    @property
    def num_bytes(self) -> int:
        """Bytes with two values of 4 bits in each byte."""
        scales = self.scale_OG.nbytes + self.offset_OG.nbytes
        return self.values_OI.numel() * self.bits // 8 + scales


def kernel_group_size(*sizes: int) -> int:
    """The largest group size of the kernels that divides all ``sizes``, 0 if there is none."""
    return next((g for g in GROUPS if not any(size % g for size in sizes)), 0)


def concat_rows(parts: Iterable[QuantizedWeight | None]) -> QuantizedWeight | None:
    """The rows of all parts as one weight, in groups that fit all. None if a part is None, or if
    parts differ in bits or order. RuntimeError if they differ in the number of inputs."""
    weights: list[QuantizedWeight] = []
    for part in parts:
        if part is None:
            return None
        weights.append(part)
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    if len({(weight.bits, weight.quantizes_inputs, weight.is_fp4) for weight in weights}) > 1:
        return None
    if not all(_is_same(weight.order_I, first.order_I) for weight in weights):
        return None
    if len({weight.values_OI.shape[1] for weight in weights}) > 1:
        raise RuntimeError("its parts have other shapes than each other")
    sizes = {weight.group_size for weight in weights}
    if len(sizes) > 1:
        group_size = min(sizes) if first.is_fp4 else kernel_group_size(*sizes)
        if not group_size:
            return None
        weights = [weight.with_group_size(group_size) for weight in weights]
    return replace(
        first,
        values_OI=torch.cat([one.values_OI for one in weights]),
        scale_OG=torch.cat([one.scale_OG for one in weights]),
        offset_OG=torch.cat([one.offset_OG for one in weights]),
    )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def stack_experts(
    experts: Iterable[Iterable[QuantizedWeight | None]],
) -> QuantizedWeight | None:
    """``concat_rows`` of each expert, stacked. None if that is None, if inputs have an order, or if
    8 bit weights are other than symmetric with one scale a row. RuntimeError for experts of
    different shapes."""
    parts: list[QuantizedWeight] = []
    for weights in experts:
        one = concat_rows(weights)
        if one is None or one.order_I is not None:
            return None
        if one.bits == 8 and (one.scale_OG.shape[1] > 1 or one.is_asymmetric):
            return None
        parts.append(one)
    first = parts[0]
    if len({(p.bits, p.quantizes_inputs, p.group_size, p.is_fp4) for p in parts}) > 1:
        return None
    return replace(
        first,
        values_OI=torch.stack([part.values_OI for part in parts]),
        scale_OG=torch.stack([part.scale_OG for part in parts]),
        offset_OG=torch.stack([part.offset_OG for part in parts]),
    )
