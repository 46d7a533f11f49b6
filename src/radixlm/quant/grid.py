"""Grid: a weight of few bits as a checkpoint has it. Legend: O outputs, I inputs, G groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """A weight of 4 bits as the checkpoint has it: value * scale + offset, a scale and an offset
    for each group of inputs. ``values_OI`` are 0..15 in uint8, scales and offsets float32."""

    values_OI: Tensor
    scale_OG: Tensor
    offset_OG: Tensor

    def widened(self) -> Tensor:
        """float32 [O, I]."""
        grouped = self.values_OI.view(*self.scale_OG.shape, -1) * self.scale_OG[..., None]
        return (grouped + self.offset_OG[..., None]).flatten(1)

    @property
    def num_bytes(self) -> int:
        """Bytes when two values share one."""
        return self.values_OI.numel() // 2 + self.scale_OG.nbytes + self.offset_OG.nbytes


def joined(grids: Sequence[Grid]) -> Grid:
    """Rows of one after those of another."""
    if len(grids) == 1:
        return grids[0]
    return Grid(
        torch.cat([one.values_OI for one in grids]),
        torch.cat([one.scale_OG for one in grids]),
        torch.cat([one.offset_OG for one in grids]),
    )
