"""Rotary tables: cos and sin of a step's tokens, once a step for each Rope of the model.

Legend: T tokens, N rows of a cached table (positions), R half the rotated channels.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import Rope
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.module import Module
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

# float32 [T, 2R]: R cosines, then R sines; [T, 4R] where a pair's channels have different
# angles: those of the first channels, then those of the second
Angles = Tensor

FIRST_ROWS = 4096  # tables grow by doubling


def axes_of(rope: Rope) -> Tensor:
    """The axis (0 time, 1 row, 2 column, 3 the place itself) that each of the R frequencies of a
    rope turns by; of each of the 2R channels where those are dealt out."""
    sections = torch.tensor(rope.mrope_sections)
    if rope.mrope_by_channel:
        return torch.arange(len(sections)).flip(0).repeat_interleave(2 * sections)
    if rope.mrope_paired:
        pairs = torch.tensor((1, 2)).repeat(rope.mrope_sections[1])
        return torch.cat((pairs, torch.zeros(rope.mrope_sections[0], dtype=torch.int64)))
    if not rope.mrope_interleaved:
        return torch.arange(3).repeat_interleave(sections)
    axes = torch.zeros(rope.dim // 2, dtype=torch.int64)
    for axis in (1, 2):  # dealt out in threes as long as an axis has some left; the rest is time
        axes[axis : 3 * rope.mrope_sections[axis] : 3] = axis
    return axes


class StaticRope:
    """Angles that depend on the position only: rows of a table that grows on demand."""

    def __init__(self, rope: Rope, kernels: Kernels, device: torch.device) -> None:
        frequencies, self._factor = inv_freq(rope, 0)
        self._axis_A = axes_of(rope).to(device) if rope.mrope_sections else None
        self._places = len(rope.mrope_sections) > 3
        self._chunk = rope.chunk
        self._inv_freq_R = self._first_R = torch.from_numpy(frequencies).to(device)
        self._kernels = kernels
        self.table_N2R = self._inv_freq_R.new_empty(0, 2 * len(frequencies))

    def reserve(self, num_rows: int) -> None:
        """Make the tables at least ``num_rows`` long."""
        have = self.table_N2R.shape[0]
        if num_rows > have:
            rows = max(num_rows, 2 * have, FIRST_ROWS)
            positions = torch.arange(rows, device=self.table_N2R.device)
            self.table_N2R = self._kernels.rope_angles(positions, self._inv_freq_R, self._factor)

    def stretch(self, factors_R: Tensor) -> None:
        """Multiply the frequencies by these factors, instead of by those of a call before."""
        self._inv_freq_R = self._first_R * factors_R
        self.table_N2R = self._first_R.new_empty(0, 2 * len(factors_R))

    def angles(self, batch: ForwardBatch) -> Angles:
        if batch.mrope is not None and self._axis_A is not None:
            return self._section_angles(batch.mrope.ids_3T, batch.positions_T, self._axis_A)
        if self._chunk:
            self.reserve(min(batch.max_kv_len, self._chunk))
            return self.table_N2R[batch.positions_T % self._chunk]
        self.reserve(batch.max_kv_len)
        return self.table_N2R[batch.positions_T]

    def _section_angles(self, ids_XT: Tensor, positions_T: Tensor, axis_A: Tensor) -> Angles:
        """Each frequency, or each channel, is rotated by the id of its axis."""
        if self._places:
            ids_XT = torch.cat((ids_XT, positions_T[None].to(ids_XT.dtype)))
        self.reserve(int(ids_XT.max()) + 1)
        columns = torch.arange(self.table_N2R.shape[1], device=axis_A.device)
        parts = torch.split(axis_A, len(columns) // 2)  # one, or those of a pair's first and second
        angles = [self.table_N2R[ids_XT[part.repeat(2)].T, columns] for part in parts]
        return torch.cat(angles, -1)


class LengthRope:
    """Angles that also depend on the length of the sequence (dynamic, longrope)."""

    def __init__(self, rope: Rope, kernels: Kernels, device: torch.device) -> None:
        self._rope, self._kernels, self._device = rope, kernels, device
        self._frequencies = lru_cache(maxsize=1024)(self._make_frequencies)

    def _make_frequencies(self, length: int) -> tuple[Tensor, float]:
        frequencies, factor = inv_freq(self._rope, length)
        return torch.from_numpy(frequencies).to(self._device), factor

    def angles(self, batch: ForwardBatch) -> Angles:
        lengths, which_T = torch.unique(batch.rope_len_T, return_inverse=True)
        pairs = [self._frequencies(length) for length in lengths.tolist()]
        inv_freq_TR = torch.stack([inv_freq_R for inv_freq_R, _ in pairs])[which_T]
        factor_T = torch.tensor([factor for _, factor in pairs], device=self._device)[which_T]
        angles_TR = batch.positions_T[:, None].float() * inv_freq_TR
        return torch.cat((torch.cos(angles_TR), torch.sin(angles_TR)), -1) * factor_T[:, None]


class RopeTables:
    """The distinct ropes of a model; layers refer to them by index."""

    def __init__(self, ropes: Sequence[Rope], kernels: Kernels, device: torch.device) -> None:
        self.ropes = tuple(ropes)
        self.makers = [
            (LengthRope if r.depends_on_length else StaticRope)(r, kernels, device)
            for r in self.ropes
        ]

    @property
    def learned(self) -> list[StaticRope]:
        """Those whose frequencies ``LearnedFrequencies`` changes."""
        pairs = zip(self.ropes, self.makers, strict=True)
        return [m for rope, m in pairs if rope.learned and isinstance(m, StaticRope)]

    def angles(self, batch: ForwardBatch) -> list[Angles]:
        """cos and sin of the step's tokens, in the order of ``ropes``."""
        return [maker.angles(batch) for maker in self.makers]


class LearnedFrequencies(Module):
    """The logarithms of what the frequencies of the learned ropes are multiplied by."""

    def __init__(self, tables: RopeTables) -> None:
        self._ropes = tables.learned
        self.logs = Param((tables.ropes[0].dim // 2,), "float32")

    def finish(self) -> None:
        factors_R = torch.exp(self.logs.take())
        for rope in self._ropes:
            rope.stretch(factors_R)
