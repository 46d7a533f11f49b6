"""Relative attention of vectors of bounded length (``spec.ClippedRelativeAttention``).

Legend: T packed tokens, B sequences of a segment, L tokens of each, D model channels, C channels,
w tokens of a convolution before its last; H query heads, K KV heads; R numbers of a head, E
distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from radixlm.arch.spec import ClippedRelativeAttention
from radixlm.kernels.ops.activation import sigmoid
from radixlm.kernels.ops.norm import unit_rms
from radixlm.layers.attention import site_of
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import (
    bias_by_distance,
    growth_of,
    run_recurrence,
    seen_of,
)
from radixlm.layers.gathered_attention import attend_gathered
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.layers.state import ConvLayer
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


def clipped(x_THC: Tensor, longest: float) -> Tensor:
    """float32; longer heads scaled down to this length."""
    x = x_THC.float()
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (longest / (length + 1e-6)).clamp(max=1.0)


def _scaled(x_THC: Tensor, by_HC: Tensor, longest: float, grown: Tensor | None) -> Tensor:
    """float32; ``grown``: further factors by position, [T, 1, 1]."""
    x = clipped(x_THC.float() * by_HC, longest)
    return x if grown is None else x * grown


class ClippedConvolution(Module):
    """x and its causal convolution, divided by the root of the number of terms. Tokens may add to
    the weights, alike for the channels of a head."""

    def __init__(
        self, channels: int, width: int, context: LayerContext, read: tuple[int, int] = (0, 0)
    ) -> None:
        """``read``: channels of what the tokens' weights are computed of, and heads; (0, 0): none
        of their own."""
        self._width, self._heads = width, read[1]
        self._share = 1 / math.sqrt(width * (2 if read[1] else 1) + 1)
        self.conv = ConvLayer(channels, width, False)
        if self._heads:
            self.by_token = context.plain_linear(read[0], self._heads * width)

    def run(
        self, x_TC: Tensor, read_TD: Tensor, batch: ForwardBatch, at: tuple[int, int]
    ) -> Tensor:
        """``at``: the row of the state pool and which of its states."""
        if not self._heads:
            mixed = run_recurrence(batch, at, x_TC, self.conv.run)
            return (x_TC + mixed) * self._share
        both = torch.cat((x_TC.float(), self.by_token.run(read_TD).float()), -1)
        mixed = run_recurrence(batch, at, both, self._weighed)
        return ((x_TC + mixed) * self._share).to(x_TC.dtype)

    def _weighed(self, both_BLC: Tensor, state_BCw: Tensor) -> tuple[Tensor, Tensor]:
        """An ``Advance``: x is followed by the tokens' weights, the present token's first."""
        channels, width = state_BCw.shape[1], self._width
        x_BLC, own = both_BLC.split_with_sizes((channels, self._heads * width), -1)
        whole = torch.cat((state_BCw, x_BLC.transpose(1, 2)), -1)
        count, y_BLC = x_BLC.shape[1], torch.zeros_like(x_BLC)
        own = own.reshape(*own.shape[:2], self._heads, width)
        own = own.repeat_interleave(channels // self._heads, 2)
        for back in range(width):
            first = width - 1 - back
            weight = self.conv.weight_CW[:, first] + own[..., back]
            y_BLC += whole[..., first : first + count].transpose(1, 2) * weight
        return y_BLC, whole[..., whole.shape[-1] - state_BCw.shape[-1] :]


class ClippedRelativeAttentionLayer(Module):
    """q; convolutions of k and v -> clipped, v normed -> attention with a bias by distance and
    sinks -> gate -> o -> a convolution. The last convolution is the feed-forward's."""

    site: AttentionSite

    def __init__(
        self,
        spec: ClippedRelativeAttention,
        dim: int,
        context: LayerContext,
        place: tuple[tuple[int, int], int],
    ) -> None:
        """``place``: (group, row) of the cache, and the row of the state pool."""
        self.spec, (self._pool, self._row) = spec, place
        self._pack, attends, channels = (
            context.kernels.pack_linear,
            spec.attention,
            spec.kv_channels,
        )
        rows = attends.heads * attends.head_dim
        self.q, self.gate = (context.linear(dim, rows, False, Shard(0)) for _ in range(2))
        self.k, self.v = (context.linear(dim, channels, False, Shard(0)) for _ in range(2))
        self.o = context.linear(rows, dim, False, Shard(1))
        self.sink = context.plain_linear(dim, attends.heads)
        self.distance = context.plain_linear(dim, attends.heads * spec.rank)
        self.profiles = Param((spec.rank, spec.extent), "float32")
        self.q_scale = Param((attends.heads, attends.head_dim), "float32")
        self.distance_scale = Param((attends.heads, spec.rank), "float32")
        read = (dim, attends.kv_heads) if spec.is_dynamic else (0, 0)
        self.k_conv, self.v_conv = (
            ClippedConvolution(channels, spec.width, context, read) for _ in range(2)
        )
        self.out_conv, self.ffn_conv = (
            ClippedConvolution(dim, spec.width, context) for _ in range(2)
        )

    def finish(self) -> None:
        self.site = site_of(self.spec.attention, self._pool, None)
        self._profiles = self._pack(self.profiles.take().T.contiguous(), None, "")
        self._q_scale, self._distance_scale = self.q_scale.take(), self.distance_scale.take()

    def at(self, pool: tuple[int, int], row: int) -> ClippedRelativeAttentionLayer:
        """This layer, once it is loaded, with another place in the cache and the state pool."""
        other = copy(self)
        other._pool, other._row = pool, row
        other.site = site_of(self.spec.attention, pool, None)
        return other

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        return self.run_apart((x_TD, x_TD, x_TD), batch)

    def run_apart(self, inputs: tuple[Tensor, Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """``run`` of what queries, keys and values read."""
        spec, attends, (x_TD, k_TD, v_TD) = self.spec, self.spec.attention, inputs
        shape = (len(x_TD), -1, attends.head_dim)
        k = self.k_conv.run(self.k.run(k_TD), k_TD, batch, (self._row, 0)).view(shape)
        v = self.v_conv.run(self.v.run(v_TD), v_TD, batch, (self._row, 1)).view(shape)
        v, grown = unit_rms(v, spec.norm.eps), growth_of(spec, batch.positions_T)
        q = _scaled(self.q.run(x_TD).view(shape), self._q_scale, spec.longest, grown)
        own = self.distance.run(x_TD).view(len(x_TD), attends.heads, spec.rank)
        own = _scaled(own, self._distance_scale, spec.longest_rank, grown)
        bias_THE = self._profiles.run(own.flatten(0, 1)).view(*own.shape[:2], -1)
        k, dtype = clipped(k, spec.longest), x_TD.dtype
        q, k, v = (t.to(dtype) for t in (q, k, v))
        bias, seen, sinks_TH = bias_by_distance(bias_THE), seen_of(attends), self.sink.run(x_TD)
        out = attend_gathered(q, k, v, self.site, batch, seen, bias, sinks_TH)
        out = (out.float() * sigmoid(self.gate.run(x_TD).float())).to(dtype)
        return self.out_conv.run(self.o.run(out), x_TD, batch, (self._row, 2))

    def convolve_ffn(self, y_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """The feed-forward's branch: [T, D]."""
        return self.ffn_conv.run(y_TD, y_TD, batch, (self._row, 3))
