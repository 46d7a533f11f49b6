"""QuantizedWeight: a weight of few bits as a checkpoint has it. Legend: O outputs, I inputs, G
groups, E
experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from radixlm.base.record import Record, replace

GROUPS = (128, 64, 32)  # inputs that share a scale in the kernels


class QuantizedWeight(Record):
    """A weight as the checkpoint has it: value * scale + offset, a scale and an offset for each
    group of inputs. ``values_OI`` are 0..15, of 8 ``bits`` 0..255, in uint8; scales and offsets
    float32. Column j belongs to input ``order_I[j]``, without an order to input j.
    ``rounds_inputs``: the checkpoint was made for activations in 8 bits. Of experts all three have
    an axis of experts in front, and no order."""

    values_OI: Tensor
    scale_OG: Tensor
    offset_OG: Tensor
    bits: int = 4
    rounds_inputs: bool = False
    order_I: Tensor | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.values_OI.shape[-1] // self.scale_OG.shape[-1]

    def widened(self) -> Tensor:
        """float32 [O, I]."""
        grouped = self.values_OI.view(*self.scale_OG.shape, -1) * self.scale_OG[..., None]
        wide = (grouped + self.offset_OG[..., None]).flatten(-2)
        if self.order_I is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.order_I, wide)

    def with_group_size(self, group: int) -> QuantizedWeight:
        """The same numbers, with scales for groups that a present one is a multiple of."""
        if group == self.group:
            return self
        times = self.group // group
        scale, offset = (t.repeat_interleave(times, -1) for t in (self.scale_OG, self.offset_OG))
        return replace(self, scale_OG=scale, offset_OG=offset)

    def to(self, device: torch.device) -> QuantizedWeight:
        """On a device."""
        order = None if self.order_I is None else self.order_I.to(device)
        values, scale, offset = (
            t.to(device) for t in (self.values_OI, self.scale_OG, self.offset_OG)
        )
        return QuantizedWeight(values, scale, offset, self.bits, self.rounds_inputs, order)

    @property
    def is_asymmetric(self) -> bool:
        """Whether zero points are others than 8, of 8 bits 128."""
        middle = float(1 << (self.bits - 1))
        return not torch.equal(self.offset_OG, -middle * self.scale_OG)

    @property
    def num_bytes(self) -> int:
        """Bytes when two values of 4 bits share one."""
        scales = self.scale_OG.nbytes + self.offset_OG.nbytes
        return self.values_OI.numel() * self.bits // 8 + scales


def kernel_group_size(*sizes: int) -> int:
    """The largest group of the kernels that divides all sizes, 0 if there is none."""
    return next((g for g in GROUPS if not any(size % g for size in sizes)), 0)


def joined(parts: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Rows of one after those of another, in groups that fit all; None where a part is, and for
    grids of other kinds or orders of inputs than each other. RuntimeError for rows of other
    lengths."""
    grids = [part for part in parts if part is not None]
    if len(grids) < len(parts):
        return None
    if len(grids) == 1:
        return grids[0]
    first = grids[0]
    if len({(grid.bits, grid.rounds_inputs) for grid in grids}) > 1:
        return None
    if not all(_is_same(grid.order_I, first.order_I) for grid in grids):
        return None
    if len({grid.values_OI.shape[1] for grid in grids}) > 1:
        raise RuntimeError("its parts have other shapes than each other")
    groups = {grid.group for grid in grids}
    if len(groups) > 1:
        group = kernel_group_size(*groups)
        if not group:
            return None
        grids = [grid.with_group_size(group) for grid in grids]
    return replace(
        first,
        values_OI=torch.cat([one.values_OI for one in grids]),
        scale_OG=torch.cat([one.scale_OG for one in grids]),
        offset_OG=torch.cat([one.offset_OG for one in grids]),
    )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def stacked(experts: Iterable[Sequence[QuantizedWeight | None]]) -> QuantizedWeight | None:
    """Joined rows of each expert, one expert behind another; None as of ``joined``, for inputs in
    an order of their own, and for 8 bits but whole rows around 128. RuntimeError for experts of
    other shapes than each other."""
    parts: list[QuantizedWeight] = []
    for grids in experts:
        one = joined(grids)
        if one is None or one.order_I is not None:
            return None
        if one.bits == 8 and (one.scale_OG.shape[1] > 1 or one.is_asymmetric):
            return None
        parts.append(one)
    first = parts[0]
    if len({(p.bits, p.rounds_inputs, p.group) for p in parts}) > 1:
        return None
    return replace(
        first,
        values_OI=torch.stack([part.values_OI for part in parts]),
        scale_OG=torch.stack([part.scale_OG for part in parts]),
        offset_OG=torch.stack([part.offset_OG for part in parts]),
    )
