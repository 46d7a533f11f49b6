"""Attention residuals (``Decoder.residual_sums``): a branch reads an average of sums of branches.

Legend: T tokens, D model channels, N finished sums, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Block, ClippedRelativeAttention
from radixlm.kernels.products import row_products
from radixlm.layers.block import BlockLayer
from radixlm.layers.clipped_attention import ClippedRelativeAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.residual import added
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

_EPS = 1e-6  # of the sums' norm, whatever rms_norm_eps is


class SumReader(Module):
    """For each learned query an average of the normalized sums, weighed by a softmax."""

    def __init__(self, dim: int, queries: int = 1) -> None:
        self._shape = (queries, dim)
        self.query = Param((dim,) if queries == 1 else self._shape, "float32")

    def finish(self) -> None:
        self._query_QD = self.query.take().view(self._shape) * self._shape[1] ** -0.5

    def run(self, sums_TND: Tensor | None, x_TD: Tensor) -> list[Tensor]:
        """[T, D] of each query; x is the sum that is not finished."""
        sums = x_TD[:, None] if sums_TND is None else torch.cat((sums_TND, x_TD[:, None]), 1)
        sums = sums.float()
        sums = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + _EPS)
        scores_TNQ = row_products(sums.flatten(0, 1), self._query_QD).view(*sums.shape[:2], -1)
        weights_TQN = scores_TNQ.transpose(1, 2).contiguous().softmax(-1)
        read = []
        for query in range(self._shape[0]):
            y_TD = torch.zeros_like(sums[:, 0])
            for number in range(sums.shape[1]):
                y_TD += sums[:, number] * weights_TQN[:, query, number, None]
            read.append(y_TD.to(x_TD.dtype))
        return read


class SummingBlock(BlockLayer):
    """A block that reads sums of branches. The first of each ``size`` finishes the present sum."""

    mixer: ClippedRelativeAttentionLayer

    def __init__(
        self,
        spec: Block,
        size: int,
        layer: int,
        dim: int,
        context: LayerContext,
        pool: tuple[int, int],
        state_row: int,
    ) -> None:
        super().__init__(spec, dim, context, -1, pool, state_row)
        assert isinstance(spec.mixer, ClippedRelativeAttention)
        self._begins, self._is_apart = layer % size == 0, spec.mixer.is_dynamic
        self._is_first = layer == 0
        if not self._is_first:
            self.sums1 = SumReader(dim, 3 if self._is_apart else 1)
        self.sums2 = SumReader(dim)
        if self._is_apart:
            kernels, device = context.kernels, context.device
            self.k_norm, self.v_norm = (
                NormLayer(spec.norm, (dim,), kernels, device) for _ in range(2)
            )

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """See ``BlockLayer``; x is the present sum."""
        x_TD, scratch = added(x_TD, pending_TD), batch.scratch
        y_TD = self._attend(x_TD, batch)
        if self._begins:
            before, new = scratch.sums_TND, x_TD[:, None]
            scratch.sums_TND = new if before is None else torch.cat((before, new), 1)
            x_TD = y_TD
        else:
            x_TD = x_TD + y_TD
        (read_TD,) = self.sums2.run(scratch.sums_TND, x_TD)
        y_TD = self.mixer.convolve_ffn(self._feed(self.norm2.run(read_TD), batch), batch)
        return x_TD + y_TD, None

    def _attend(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        read = [x_TD] if self._is_first else self.sums1.run(batch.scratch.sums_TND, x_TD)
        q_TD, k_TD, v_TD = read if len(read) > 1 else read * 3
        q_TD = self.norm1.run(q_TD)
        if not self._is_apart:
            return self.mixer.run_apart((q_TD, q_TD, q_TD), batch)
        return self.mixer.run_apart((q_TD, self.k_norm.run(k_TD), self.v_norm.run(v_TD)), batch)
