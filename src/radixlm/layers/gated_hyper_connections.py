"""Residual streams that branches read through a gate
(``spec.GatedHyperConnections``), and what hashed runs of tokens add to them (``spec.Ngrams``).

Legend: T tokens, N streams, D model channels, E channels of all hashed runs, G heads of hashes, B
sequences of a segment, L tokens of each.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Block, DeltaNet, GatedHyperConnections, Ngrams, Norm
from radixlm.kernels.ops.activation import sigmoid, silu
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import run_recurrence
from radixlm.layers.embedding import Embedding
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.pools.state import StateStep
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class StreamNorm(Module):
    """RMS norm of each stream by itself, with weights a channel of every stream."""

    def __init__(self, norm: Norm, count: int, dim: int) -> None:
        self._norm, self._shape = norm, (count, dim)
        self.weight = Param((count * dim,), "float32")

    def finish(self) -> None:
        self._weight_ND = (self.weight.take() + self._norm.offset).view(self._shape)

    def run(self, x_TC: Tensor) -> Tensor:
        """float32 [T, N, D] of [T, N * D]."""
        x = x_TC.float().view(-1, *self._shape)
        size = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._norm.eps)
        normed: Tensor = x * size * self._weight_ND
        return normed


class StreamReader(Module):
    """A branch's input, and the weights of its output; the last one has no output."""

    def __init__(
        self, spec: GatedHyperConnections, dim: int, context: LayerContext, joins: bool
    ) -> None:
        self._count, self._joins, self._kernels = spec.count, joins, context.kernels
        wide = spec.count * dim
        self.norm = StreamNorm(spec.norm, spec.count, dim)
        self.down = context.plain_linear(wide, spec.rank)
        self.up = context.plain_linear(spec.rank, wide)
        if joins:
            self.inject = context.plain_linear(wide, spec.count)

    def run(self, x_TC: Tensor) -> tuple[Tensor, Tensor | None]:
        """The branch's input [T, D] and the weights of its output [T, N]."""
        normed_TND = self.norm.run(x_TC)
        flat = normed_TND.flatten(1).to(x_TC.dtype)
        low = self._kernels.activate(self.down.run(flat) / self._count, "silu")
        opened = self._kernels.sigmoid(self.up.run(low))
        read = (opened.view(normed_TND.shape) * normed_TND).mean(1).to(x_TC.dtype)
        if not self._joins:
            return read, None
        return read, 2 * self._kernels.sigmoid(self.inject.run(flat) / self._count)


class GatedHyperConnectionBlock(WholeBlock):
    """A block on N streams, [T, N * D]."""

    def __init__(
        self,
        spec: Block,
        streams: GatedHyperConnections,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        state_row: int,
    ) -> None:
        super().__init__(spec, dim, context, rope, pool, state_row)
        self.streams1, self.streams2 = (StreamReader(streams, dim, context, True) for _ in "12")
        self._has_ngrams = isinstance(spec.mixer, DeltaNet) and spec.mixer.ngrams is not None
        if isinstance(spec.mixer, DeltaNet) and spec.mixer.ngrams is not None:
            first = len(spec.mixer.states) - len(spec.mixer.ngrams.states)
            self.ngrams = NgramLayer(spec.mixer.ngrams, context, state_row, first)

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``; x are the streams [T, N * D]."""
        x_TC = x_TD
        if self._has_ngrams:
            x_TC = x_TC + self.ngrams.run(x_TC, batch)
        read, weights = self.streams1.run(x_TC)
        x_TC = _joined(x_TC, self._mix(read, batch, angles), weights)
        read, weights = self.streams2.run(x_TC)
        return _joined(x_TC, self._feed(read, batch), weights)


def _joined(x_TC: Tensor, y_TD: Tensor, weights_TN: Tensor | None) -> Tensor:
    assert weights_TN is not None
    added: Tensor = (y_TD[:, None] * weights_TN[..., None]).flatten(1).to(x_TC.dtype)
    return x_TC + added


class GatedHyperConnectionEnds(Module):
    """What runs before the first and after the last block."""

    def __init__(self, spec: GatedHyperConnections, dim: int, context: LayerContext) -> None:
        self._count = spec.count
        self.reader = StreamReader(spec, dim, context, False)

    def begin(self, x_TD: Tensor) -> Tensor:
        """The streams, all the same: [T, N * D]."""
        return x_TD.repeat(1, self._count)

    def end(self, x_TC: Tensor) -> Tensor:
        """One stream again: [T, D]."""
        return self.reader.run(x_TC)[0]


class NgramLayer(Module):
    """Rows of hashed runs -> a key a stream and a value; gated by the streams -> a convolution."""

    def __init__(self, spec: Ngrams, context: LayerContext, row: int, first: int) -> None:
        """``row`` of the state pool, where this layer's states begin at ``first``."""
        self.spec, self._row, self._first = spec, row, first
        wide = spec.streams * spec.width
        self.table = Embedding(spec.rows, spec.dim // len(spec.sizes), context)
        self.key = context.linear(spec.dim, wide)
        self.value = context.linear(spec.dim, spec.width)
        self.key_norm, self.stream_norm, self.conv_norm = (
            StreamNorm(spec.norm, spec.streams, spec.width) for _ in range(3)
        )
        self.conv = Param((wide, 1, spec.conv), "float32")
        sizes = torch.tensor(spec.sizes, device=context.device)
        starts = [0, *accumulate(spec.sizes)][:-1]
        self._sizes_G, self._starts_G = sizes, torch.tensor(starts, device=context.device)

    def finish(self) -> None:
        self._conv = self.conv.take()

    def run(self, x_TC: Tensor, batch: ForwardBatch) -> Tensor:
        """What is added to the streams: [T, N * D]."""
        spec = self.spec
        rows_TE = self.table.run(self._rows(batch).flatten()).view(x_TC.shape[0], -1)
        key_TND = self.key_norm.run(self.key.run(rows_TE))
        fit_TN = (key_TND * self.stream_norm.run(x_TC)).sum(-1) / spec.width**0.5
        fit_TN = fit_TN.abs().clamp(min=1e-6).sqrt() * fit_TN.sign()
        value_TD = self.value.run(rows_TE)
        gated = (sigmoid(fit_TN)[..., None] * value_TD[:, None]).flatten(1).to(x_TC.dtype)
        normed = self.conv_norm.run(gated).flatten(1)
        return gated + run_recurrence(batch, (self._row, self._first), normed, self._convolve)

    def _convolve(self, x_BLC: Tensor, state_BCw: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat((state_BCw, x_BLC.transpose(1, 2)), -1)
        y = F.conv1d(whole, self._conv, None, groups=whole.shape[1], dilation=self.spec.length)
        return silu(y).transpose(1, 2), whole[..., whole.shape[-1] - state_BCw.shape[-1] :]

    def _rows(self, batch: ForwardBatch) -> Tensor:
        """Rows of the tables that each token reads: int64 [T, G]. The tokens before are kept as
        distances from ``end``, so that no tokens at all are so many ends."""
        step: StateStep = batch.states
        kept_ids, end = step.pool.layers[self._row][self._first + 1], self.spec.end
        out = batch.token_ids_T.new_empty(len(batch.token_ids_T), len(self.spec.sizes))
        for segment in step.segments:
            ids_BL = batch.token_ids_T[segment.rows].view(segment.num_sequences, -1)
            before = kept_ids[segment.source].long() + end
            whole = torch.cat((before, ids_BL), 1)
            kept_ids[segment.target] = (whole[:, -before.shape[1] :] - end).to(kept_ids.dtype)
            out[segment.rows] = self._hashed(whole)[:, before.shape[1] :].flatten(0, 1)
        return out

    def _hashed(self, ids_BM: Tensor) -> Tensor:
        """[B, M, G] of tokens with those before them."""
        spec, parts = self.spec, list[Tensor]()
        heads = len(spec.sizes) // (spec.length - 1)
        mixed, is_open = ids_BM * spec.multipliers[0], torch.ones_like(ids_BM, dtype=torch.bool)
        for shift in range(1, spec.length):
            moved = F.pad(ids_BM, (shift, 0), value=spec.end)[:, : ids_BM.shape[1]]
            is_open = is_open & (moved != spec.end)
            moved = torch.where(is_open, moved, spec.end)
            mixed = mixed ^ (moved * spec.multipliers[shift])
            part = slice((shift - 1) * heads, shift * heads)
            parts.append(
                torch.remainder(mixed[..., None], self._sizes_G[part]) + self._starts_G[part]
            )
        return torch.cat(parts, -1)
