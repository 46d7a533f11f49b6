"""Blocks that are no list of steps. Legend: T tokens, D model channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radixlm.layers.block import BlockLayer
from radixlm.layers.residual import added
from radixlm.layers.rope import Angles
from radixlm.step.batch import ForwardBatch


class WholeBlock(BlockLayer):
    """Leaves no branch that is yet to be added to x."""

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """``run``; x itself may be changed."""
        raise NotImplementedError

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """See ``BlockLayer``."""
        return self.run_whole(added(x_TD, pending_TD), batch, angles), None
