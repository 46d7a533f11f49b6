"""Whole numbers that a checkpoint gives, as packers of linear maps take them. Legend: O outputs,
G groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

# Values 0..15 with (scale, offset), float32 [O, G]: weight = value * scale + offset; or int8 values
# with (scale [O], None). Of experts with an axis in front.
QuantScales = tuple[Tensor, Tensor | None]


def is_symmetric(grid: QuantScales) -> bool:
    """Whether offsets say no more than that 0..15 stand for -8..7 (int8 values always do)."""
    scale, offset = grid
    return offset is None or torch.equal(offset, -8.0 * scale)


def expert_scales(grid: QuantScales | None, expert: int) -> QuantScales | None:
    """The scales and offsets of one expert."""
    if grid is None:
        return None
    scale, offset = grid
    return scale[expert], None if offset is None else offset[expert]
