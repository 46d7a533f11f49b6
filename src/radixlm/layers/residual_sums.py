"""Attention residuals (``Decoder.residual_sums``): a branch reads an average of sums of branches.

Legend: T tokens, D model channels, N finished sums, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Block, ClippedRelativeAttention, Decoder
from radixlm.kernels.ops.norm import unit_rms
from radixlm.kernels.products import row_products
from radixlm.layers.clipped_attention import ClippedRelativeAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.quant.param import Param
from radixlm.step.batch import AttentionSite, ForwardBatch

_EPS = 1e-6  # of the sums' norm, whatever rms_norm_eps is
READERS = ("q", "k", "v", "ffn")  # what reads messages


class SumReader(Module):
    """For each learned query an average of the normalized sums, weighed by a softmax."""

    def __init__(self, dim: int, queries: int = 1) -> None:
        self._shape = (queries, dim)
        self.query = Param((dim,) if queries == 1 else self._shape, "float32")

    def finish(self) -> None:
        self._query_QD = self.query.take().view(self._shape) * self._shape[1] ** -0.5

    def run(self, sums_TND: Tensor | None, x_TD: Tensor) -> list[Tensor]:
        """[T, D] of each query; x is the sum that is not finished."""
        return self.read(self._query_QD, sums_TND, x_TD)

    @staticmethod
    def read(query_QD: Tensor, sums_TND: Tensor | None, x_TD: Tensor) -> list[Tensor]:
        """``run`` of these queries."""
        sums = x_TD[:, None] if sums_TND is None else torch.cat((sums_TND, x_TD[:, None]), 1)
        sums = unit_rms(sums, _EPS)
        scores_TNQ = row_products(sums.flatten(0, 1), query_QD).view(*sums.shape[:2], -1)
        weights_TQN = scores_TNQ.transpose(1, 2).contiguous().softmax(-1)
        read = []
        for query in range(len(query_QD)):
            y_TD = torch.zeros_like(sums[:, 0])
            for number in range(sums.shape[1]):
                y_TD += sums[:, number] * weights_TQN[:, query, number, None]
            read.append(y_TD.to(x_TD.dtype))
        return read


class MessageReader(SumReader):
    """The messages of each looped layer, of the sums of the pass before."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__(dim, len(READERS) * num_layers)

    def run_layer(self, layer: int, sums_TND: Tensor, x_TD: Tensor) -> list[Tensor]:
        """[T, D] of each of ``READERS``."""
        first = len(READERS) * layer
        return self.read(self._query_QD[first : first + len(READERS)], sums_TND, x_TD)


class MessageGate(Module):
    """(1 - forget) * x + gain * message, where both factors are computed of both."""

    def __init__(self, eps: float, rank: int, dim: int, context: LayerContext) -> None:
        self._eps = eps
        self.down = context.plain_linear(2 * dim, rank)
        self.forget, self.gain = (context.plain_linear(rank, dim) for _ in range(2))

    def run(self, x_TD: Tensor, message_TD: Tensor) -> Tensor:
        """[T, D]."""
        both = torch.cat([unit_rms(t, self._eps) for t in (x_TD, message_TD)], -1)
        low_TR = self.down.run(both.to(x_TD.dtype))
        forget, gain = (torch.tanh(one.run(low_TR)) for one in (self.forget, self.gain))
        return (1 - forget) * x_TD + gain * message_TD


class SummingBlock(WholeBlock):
    """A block that reads sums of branches. The first of each ``size`` finishes the present sum."""

    mixer: ClippedRelativeAttentionLayer

    def __init__(
        self,
        decoder: Decoder,
        layer: int,
        context: LayerContext,
        pool: tuple[int, int],
        state_row: int,
    ) -> None:
        spec, dim, loop = decoder.blocks[layer], decoder.dim, decoder.message_loop
        super().__init__(spec, dim, context, -1, pool, state_row)
        assert isinstance(spec.mixer, ClippedRelativeAttention)
        self._is_apart, self._is_first = spec.mixer.is_dynamic, layer == 0
        stored = layer if loop is None else loop.stored(layer)
        self._begins = stored % decoder.residual_sums == 0
        if not self._is_first:
            self.sums1 = SumReader(dim, 3 if self._is_apart else 1)
        self.sums2 = SumReader(dim)
        if self._is_apart:
            kernels, device = context.kernels, context.device
            self.k_norm, self.v_norm = (
                NormLayer(spec.norm, (dim,), kernels, device) for _ in range(2)
            )
        self._loop_place = -1
        if loop is not None and loop.first <= layer < loop.end:
            self._loop_place, eps = layer - loop.first, spec.norm.eps
            self.gates = [MessageGate(eps, loop.rank, dim, context) for _ in READERS]

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``; x is the present sum."""
        scratch = batch.scratch
        if self._loop_place == 0:
            assert scratch.sums_TND is not None, "a loop at the first layer"
            scratch.loop_start = x_TD, scratch.sums_TND
        return self._visit(x_TD, batch, self.mixer, None)

    def run_again(
        self,
        x_TD: Tensor,
        batch: ForwardBatch,
        mixer: ClippedRelativeAttentionLayer,
        reader: MessageReader,
    ) -> Tensor:
        """The block in a later pass, whose cache and state are those of ``mixer``."""
        scratch = batch.scratch
        if self._loop_place == 0:
            assert scratch.loop_start is not None and scratch.sums_TND is not None
            begun = scratch.loop_start[1].shape[1]
            # without the sum that the loop's first layer finishes, the same in each pass
            scratch.loop_read = x_TD, scratch.sums_TND[:, begun + 1 :]
            x_TD, scratch.sums_TND = scratch.loop_start
        assert scratch.loop_read is not None
        before_TD, sums_TND = scratch.loop_read
        messages = reader.run_layer(self._loop_place, sums_TND, before_TD)
        return self._visit(x_TD, batch, mixer, messages)

    def _visit(
        self,
        x_TD: Tensor,
        batch: ForwardBatch,
        mixer: ClippedRelativeAttentionLayer,
        messages: list[Tensor] | None,
    ) -> Tensor:
        scratch = batch.scratch
        y_TD = mixer.run_apart(self._inputs(x_TD, scratch.sums_TND, messages), batch)
        if self._begins:
            before, new = scratch.sums_TND, x_TD[:, None]
            scratch.sums_TND = new if before is None else torch.cat((before, new), 1)
            x_TD = y_TD
        else:
            x_TD = x_TD + y_TD
        (read_TD,) = self.sums2.run(scratch.sums_TND, x_TD)
        if messages is not None:
            read_TD = self.gates[-1].run(read_TD, messages[-1])
        return x_TD + mixer.convolve_ffn(self._feed(self.norm2.run(read_TD), batch), batch)

    def _inputs(
        self, x_TD: Tensor, sums_TND: Tensor | None, messages: list[Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values read."""
        read = [x_TD] if self._is_first else self.sums1.run(sums_TND, x_TD)
        if not self._is_apart and messages is None:
            h_TD = self.norm1.run(read[0])
            return h_TD, h_TD, h_TD
        q_TD, k_TD, v_TD = read if len(read) > 1 else read * 3
        if messages is not None:
            mixed = zip(self.gates[:3], (q_TD, k_TD, v_TD), messages[:3], strict=True)
            q_TD, k_TD, v_TD = (gate.run(x, message) for gate, x, message in mixed)
        norms = (self.k_norm, self.v_norm) if self._is_apart else (self.norm1, self.norm1)
        return self.norm1.run(q_TD), norms[0].run(k_TD), norms[1].run(v_TD)


class RepeatedBlock(WholeBlock):
    """A later pass of a looped block, with a cache and a state of its own."""

    def __init__(self, spec: Block, pool: tuple[int, int], state_row: int) -> None:
        self.spec, self._pool, self._row = spec, pool, state_row

    def finish(self) -> None:
        """``bind`` comes later, once the first pass is loaded."""

    def bind(self, block: SummingBlock, reader: MessageReader) -> None:
        """Share the weights of the block of the first pass."""
        self._shared = block, block.mixer.at(self._pool, self._row), reader

    @property
    def site(self) -> AttentionSite:
        return self._shared[1].site

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``."""
        block, mixer, reader = self._shared
        return block.run_again(x_TD, batch, mixer, reader)
