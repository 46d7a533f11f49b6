"""Attention whose queries, keys and values pass convolutions, so that it has KV pages and a state.

Legend: T packed tokens, B sequences of a segment, L tokens of each, D model channels, C channels,
H query heads, K KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import (
    Attention,
    ClippedRelativeAttention,
    CompressedConvAttention,
    RelativeAttention,
)
from radixlm.layers.attention import qk_norm_of, site_of
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import QueryChunk, attend_gathered
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.state import ConvLayer
from radixlm.pools.state import StateStep
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch

Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run_recurrence(
    batch: ForwardBatch, place: tuple[int, int], x_TC: Tensor, advance: Advance
) -> Tensor:
    """``advance`` ([B, L, C], state) -> ([B, L, C'], state) over the step's tokens, segment by
    segment; ``place`` is the row of the state pool and which of its states. [T, C'] in the dtype
    of x."""
    step: StateStep = batch.states
    row, index = place
    states, out = step.pool.layers[row][index], None
    for segment in step.segments:
        part = x_TC[segment.rows].float().view(segment.num_sequences, -1, x_TC.shape[1])
        y_BLC, after = advance(part, states[segment.source].float())
        states[segment.target] = after.to(states.dtype)
        if out is None:
            out = x_TC.new_empty(x_TC.shape[0], y_BLC.shape[2])
        out[segment.rows] = y_BLC.flatten(0, 1).to(x_TC.dtype)
    assert out is not None, "a step without tokens"
    return out


class CompressedConvAttentionLayer(Module):
    """qk -> two convolutions, plus a mean of both -> unit heads -> rope -> attention -> o."""

    site: AttentionSite

    def __init__(
        self,
        spec: CompressedConvAttention,
        dim: int,
        context: LayerContext,
        rope: int,
        place: tuple[tuple[int, int], int],
    ) -> None:
        """``place``: (group, row) of the cache, and the row of the state pool."""
        self.spec, self._rope, (self._pool, self._row) = spec, rope, place
        self._prepare = context.kernels.prepare_qk
        attends, channels = spec.attention, spec.conv_channels
        heads, late = attends.heads * attends.head_dim, spec.late_channels
        self._rows, bias = (heads, channels - heads), attends.qkv_bias
        self.qk = context.linear(dim, channels, bias, Shard(0, self._rows))
        self.current = context.linear(dim, channels - heads - late, bias)
        self.late = context.linear(dim, late)
        if bias:
            self.late_bias = Param((late,), "float32")
        self.conv = ConvLayer(channels, spec.widths[0], True)
        self.grouped = Param((channels, attends.head_dim, spec.widths[1]), "float32")
        self.grouped_bias = Param((channels,), "float32")
        self.key_scale = Param((attends.kv_heads,), "float32")
        self.o = context.linear(heads, dim, attends.o_bias, Shard(1))

    def finish(self) -> None:
        self.site = site_of(self.spec.attention, self._pool, None)
        self._grouped = self.grouped.take(), self.grouped_bias.take()
        self._key_scale_K1 = self.key_scale.take()[:, None]
        self._late_bias = self.late_bias.take() if self.spec.attention.qkv_bias else None

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        q, k = self._queries_and_keys(self.qk.run(x_TD), batch)
        cos_sin = angles[self._rope] if self._rope >= 0 else None
        self._prepare(q, k, None, cos_sin, False)
        v = torch.cat((self.current.run(x_TD), self._late(x_TD, batch)), -1)
        out = batch.attn.run(q, k, v.view(k.shape), self.site)
        return self.o.run(out)

    def _queries_and_keys(self, qk_TC: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """[T, H, C] and [T, K, C]."""
        attends = self.spec.attention
        q, k = (
            t.view(len(qk_TC), -1, attends.head_dim) for t in qk_TC.split_with_sizes(self._rows, -1)
        )
        groups = attends.heads // attends.kv_heads
        mean_q = (q + k.repeat_interleave(groups, 1)) * 0.5
        mean_k = mean_q.view(len(q), attends.kv_heads, groups, -1).mean(2)
        mixed = run_recurrence(batch, (self._row, 0), qk_TC, self._convolve)
        q, k = (
            t.view(shape)
            for t, shape in zip(
                mixed.split_with_sizes(self._rows, -1), (mean_q.shape, mean_k.shape), strict=True
            )
        )
        size = attends.head_dim**0.5
        q, k = (F.normalize(t, dim=-1, eps=1e-7) * size for t in (q + mean_q, k + mean_k))
        return q, (k * self._key_scale_K1).to(q.dtype)

    def _convolve(self, x_BLC: Tensor, state_BCw: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat((state_BCw, x_BLC.transpose(1, 2)), -1)
        y = F.conv1d(whole, self.conv.weight_CW[:, None], self.conv.bias_C, groups=whole.shape[1])
        weight, bias = self._grouped
        y = F.conv1d(y, weight, bias, groups=whole.shape[1] // self.spec.attention.head_dim)
        return y.transpose(1, 2), whole[..., whole.shape[-1] - state_BCw.shape[-1] :]

    def _late(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """The part of v that comes from the token before."""
        late = run_recurrence(batch, (self._row, 1), self.late.run(x_TD), shifted)
        return late if self._late_bias is None else (late + self._late_bias).to(late.dtype)


def shifted(x_BLC: Tensor, before_BC: Tensor) -> tuple[Tensor, Tensor]:
    """An ``Advance``: each token gets the row of the token before it."""
    return torch.cat((before_BC[:, None], x_BLC[:, :-1]), 1), x_BLC[:, -1]


def growth_of(
    spec: RelativeAttention | ClippedRelativeAttention, positions_T: Tensor
) -> Tensor | None:
    """The factors of queries and profiles by position, [T, 1, 1]; None: they do not grow."""
    if not spec.grows_from:
        return None
    lengths_T = (positions_T + 1).float() / spec.grows_from
    return (1.0 + spec.growth * torch.log(lengths_T.clamp(min=1.0)))[:, None, None]


def bias_by_distance(bias_THE: Tensor) -> Callable[[QueryChunk], Tensor]:
    """What scores gain, [H, Q, N]: a bias of each token and head by distance, none beyond E."""

    def bias(chunk: QueryChunk) -> Tensor:
        distance_QN, extent = chunk.distance_QN, bias_THE.shape[2]
        index = distance_QN.clamp(0, extent - 1).expand(bias_THE.shape[1], -1, -1)
        gained = bias_THE[chunk.rows].transpose(0, 1).gather(2, index)
        return gained.masked_fill(distance_QN >= extent, 0.0)

    return bias


def seen_of(attends: Attention) -> Callable[[QueryChunk], Tensor]:
    """Which tokens queries see, [Q, N]: those of the window, or all before."""
    window = attends.window
    return lambda chunk: chunk.distance_QN < window if window else chunk.causal_QN


class RelativeAttentionLayer(Module):
    """q; convolutions of k and v -> norms -> attention with a bias by distance -> o -> a
    convolution. The last convolution is the feed-forward's."""

    site: AttentionSite

    def __init__(
        self,
        spec: RelativeAttention,
        dim: int,
        context: LayerContext,
        place: tuple[tuple[int, int], int],
    ) -> None:
        """``place``: (group, row) of the cache, and the row of the state pool."""
        self.spec, (self._pool, self._row) = spec, place
        self._prepare, attends = context.kernels.prepare_qk, spec.attention
        self._pack = context.kernels.pack_linear
        rows = attends.heads * attends.head_dim
        self._rows = (rows, spec.kv_channels, spec.kv_channels)
        self.qkv = context.linear(dim, sum(self._rows), False, Shard(0, self._rows))
        self.distance = context.plain_linear(dim, attends.heads * spec.rank)
        self.profiles = Param((spec.rank, spec.extent), "float32")
        self.o = context.linear(rows, dim, False, Shard(1))
        for name, (shape, _) in zip(CONVOLUTIONS, spec.states, strict=True):
            setattr(self, name, ConvLayer(shape[0], spec.width, False))
        norm = attends.qk_norm_spec
        assert norm is not None
        self.q_norm, self.k_norm = (
            NormLayer(norm, (attends.head_dim,), context.kernels, context.device) for _ in "qk"
        )

    def finish(self) -> None:
        self.site = site_of(self.spec.attention, self._pool, None)
        self._norms = qk_norm_of(self.spec.attention, (self.q_norm, self.k_norm))
        self._profiles = self._pack(self.profiles.take().T.contiguous(), None, "")

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        spec, attends = self.spec, self.spec.attention
        q, k, v = self.qkv.run(x_TD).split_with_sizes(self._rows, -1)
        k, v = self._convolved(k, batch, 0), self._convolved(v, batch, 1)
        q, k, v = (t.reshape(len(x_TD), -1, attends.head_dim) for t in (q, k, v))
        self._prepare(q, k, self._norms, None, False)
        states_THR = self.distance.run(x_TD).float().view(len(x_TD), attends.heads, spec.rank)
        bias_THE = self._profiles.run(states_THR.flatten(0, 1)).view(*states_THR.shape[:2], -1)
        grown = growth_of(spec, batch.positions_T)
        if grown is not None:
            q, bias_THE = (q.float() * grown).to(q.dtype), bias_THE * grown
        bias, seen = bias_by_distance(bias_THE), seen_of(attends)
        out = attend_gathered(q, k, v, self.site, batch, seen, bias)
        return self._convolved(self.o.run(out), batch, 2)

    def convolve_ffn(self, y_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """The feed-forward's branch: [T, D]."""
        return self._convolved(y_TD, batch, 3)

    def _convolved(self, x_TC: Tensor, batch: ForwardBatch, index: int) -> Tensor:
        conv: ConvLayer = getattr(self, CONVOLUTIONS[index])
        return x_TC + run_recurrence(batch, (self._row, index), x_TC, conv.run)


CONVOLUTIONS = ("k_conv", "v_conv", "out_conv", "ffn_conv")  # in the order of the states
ConvolvedLayer = CompressedConvAttentionLayer | RelativeAttentionLayer


def make_convolved(
    spec: CompressedConvAttention | RelativeAttention,
    dim: int,
    context: LayerContext,
    rope: int,
    pool: tuple[int, int],
    row: int,
) -> ConvolvedLayer:
    """The layer of the record; ``row`` is its place in the state pool."""
    if isinstance(spec, RelativeAttention):
        return RelativeAttentionLayer(spec, dim, context, (pool, row))
    return CompressedConvAttentionLayer(spec, dim, context, rope, (pool, row))
