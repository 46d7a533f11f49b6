"""Data-parallel attention: the ranks of a layer are divided into groups that attend to their own
requests. What follows the attention sees the tokens of all groups, one group after another.

Legend: T tokens, D numbers of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from radixlm.distributed.groups import Ranks


class StepAdapters(Protocol):
    """The adapters of the tokens that layers run on (``layers.linear.StepAdapters``)."""

    rows: Any


class AttentionGroups:
    """The groups as one rank sees them. ``counts``: tokens of each group in the step that runs.
    ``splits_head``: a group computes the logits of its own tokens only. ``lora``: the adapters of
    the tokens of all groups; ``adapters``: those of the tokens that a layer runs on."""

    def __init__(self, ranks: Ranks, splits_head: bool = False) -> None:
        place = ranks.place
        self.splits_head = splits_head
        self.tp, self.ranks_each = ranks.tp, place.attn_tp
        self.group, self.num_groups = place.attn_dp_rank, place.tp // place.attn_tp
        self._brings = place.attn_tp_rank == 0  # the ranks of a group hold the same tokens
        self.counts: Sequence[int] = (0,) * self.num_groups
        self.lora: Any = None
        self.adapters: StepAdapters | None = None

    def gather(self, x_TD: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """The rows of all groups, on every rank. ``counts``: of each group, if not its tokens."""
        given = self.counts if counts is None else counts
        by_rank = (n for count in given for n in (count, *(0,) * (self.ranks_each - 1)))
        mine = x_TD if self._brings else x_TD[:0]
        return self.tp.all_gather_rows(mine.contiguous(), tuple(by_rank))

    def collect(self, own_RV: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all groups on rank 0, no rows elsewhere; ``own`` has this group's rows on its
        first rank. ``counts``: rows of each group."""
        if self.tp.rank:
            if self._brings and counts[self.group]:
                self.tp.send(own_RV, 0)
            return own_RV[:0]
        parts = [own_RV[: counts[0]]]
        for group, count in enumerate(counts[1:], 1):
            if count:
                shape = (count, own_RV.shape[1])
                parts.append(self.tp.receive(shape, own_RV.dtype, group * self.ranks_each))
        return torch.cat(parts)

    def own(self, y_TD: Tensor) -> Tensor:
        """The rows of this rank's group among those of all."""
        first = (0, *accumulate(self.counts))
        return y_TD[first[self.group] : first[self.group + 1]]

    def run(self, run: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
        """What a layer that sees the tokens of all groups makes of this group's."""
        adapters = self.adapters
        if adapters is None:
            return self.own(run(self.gather(x_TD)))
        own, adapters.rows = adapters.rows, self.lora
        try:
            return self.own(run(self.gather(x_TD)))
        finally:
            adapters.rows = own

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        mine = torch.tensor([[int(yes)]])
        return bool(self.tp.all_gather_rows(mine, (1,) * self.tp.size).all())
