"""A decoder layer whose weights several blocks share (``spec.SharedLayer``), and blocks that ask
one: h = norm(x + matrix(layer([x; embedding]))) is what their mixer reads.

Legend: T packed tokens, D model channels, H query heads, K KV heads, C head channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from radixlm.arch.spec import Block, SharedLayer
from radixlm.base.record import replace
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.residual import added
from radixlm.layers.rope import Angles
from radixlm.quant.param import Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


class LowRankAdapter(Module):
    """b(a(x)), what a call adds to a projection."""

    def __init__(self, rank: int, inputs: int, outputs: int, context: LayerContext) -> None:
        self.a = context.plain_linear(inputs, rank)
        self.b = context.plain_linear(rank, outputs)

    def run(self, x_TD: Tensor) -> Tensor:
        """The change: [T, outputs]."""
        return self.b.run(self.a.run(x_TD))


class CallAdapters(Module):
    """The low-rank changes of one call."""

    def __init__(self, spec: SharedLayer, dim: int, context: LayerContext) -> None:
        attention = spec.attention
        self._changes_qkv = spec.changes_qkv
        self.up = LowRankAdapter(spec.rank, dim, 2 * spec.ffn.inner, context)
        if spec.changes_qkv:
            heads = (attention.heads, attention.kv_heads, attention.kv_heads)
            self.qkv = [
                LowRankAdapter(spec.rank, 2 * dim, count * attention.head_dim, context)
                for count in heads
            ]

    def of_qkv(self, x_TD: Tensor) -> Tensor | None:
        """What q, k and v gain, one after another."""
        return torch.cat([one.run(x_TD) for one in self.qkv], -1) if self._changes_qkv else None


class SharedAttention(AttentionLayer):
    """Attention that a call's changes join."""

    changes: CallAdapters | None = None

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        gained = self.changes.of_qkv(x_TD) if self.changes is not None else None
        if gained is None:
            return super()._project(x_TD)
        spec = self.spec
        q, k, v = (self.qkv.run(x_TD) + gained).split_with_sizes(self.rows, -1)
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = (part.view(-1, spec.kv_heads, spec.head_dim) for part in (k, v))
        return q, k, v, None


class SharedBlock(Module):
    """The weights of one shared layer, and the changes of all its calls."""

    def __init__(
        self, calls: Sequence[SharedLayer], dim: int, context: LayerContext, rope: int
    ) -> None:
        spec = calls[0]
        kernels, device, inner = context.kernels, context.device, spec.ffn.inner
        assert spec.ffn.gated and not spec.attention.gate
        self.spec, self._activate = spec, kernels.activate
        self.norm1 = NormLayer(spec.norm, (2 * dim,), kernels, device)
        self.norm2 = NormLayer(spec.norm, (dim,), kernels, device)
        self.attention = SharedAttention(spec.attention, 2 * dim, context, rope, (-1, -1), dim)
        parts = Shard(0, (inner, inner))
        # gate and up stay apart from their activation: a call's changes come between
        self.up = context.linear(dim, 2 * inner, spec.ffn.bias, parts)
        self.down = context.linear(inner, dim, spec.ffn.bias, Shard(1))
        self.changes = [CallAdapters(call, dim, context) for call in calls if call.rank]

    def call(self, number: int, place: tuple[int, int]) -> SharedBlockCall:
        """The layer as call ``number`` runs it, with keys and values at ``place`` (group, row)."""
        return SharedBlockCall(self, self.changes[number] if self.changes else None, place)

    def feed(self, x_TD: Tensor, changes: CallAdapters | None) -> Tensor:
        """The feed-forward: [T, D]."""
        both = self.up.run(x_TD)
        if changes is not None:
            both = both + changes.up.run(x_TD)
        gate, up = both.chunk(2, -1)
        return self.down.run(self._activate(gate.contiguous(), self.spec.ffn.act) * up)


class SharedBlockCall:
    """One place at which a bank runs; no part of the tree that is loaded."""

    def __init__(
        self, bank: SharedBlock, changes: CallAdapters | None, place: tuple[int, int]
    ) -> None:
        group, row = place
        self._bank, self._changes = bank, changes
        self._attention = copy(bank.attention)
        self._attention.changes = changes
        self._attention.site = replace(bank.attention.site, group=group, layer=row)

    @property
    def site(self) -> AttentionSite:
        """The call's own attention."""
        return self._attention.site

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """What the layer gives: [T, D]."""
        assert batch.scratch.embeds_TD is not None
        bank = self._bank
        both_T2D = torch.cat((x_TD, batch.scratch.embeds_TD), -1)
        h_TD = self._attention.run(bank.norm1.run(both_T2D), batch, angles)
        return bank.feed(bank.norm2.run(h_TD), self._changes)


class SharedBlockCaller(BlockLayer):
    """A block whose mixer also reads what a shared layer says."""

    def __init__(self, spec: Block, dim: int, context: LayerContext, state_row: int) -> None:
        super().__init__(replace(spec, shared_block=None), dim, context, -1, (-1, -1), state_row)
        assert spec.layout == "pre" and spec.ffn is None and spec.mixer is not None
        self.asked = context.linear(dim, dim)

    def bind(self, call: SharedBlockCall) -> None:
        """After loading: the call that the block makes."""
        self._call = call

    @property
    def site(self) -> AttentionSite:
        """That of the shared layer's call."""
        return self._call.site

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """See ``BlockLayer``."""
        x_TD = added(x_TD, pending_TD)
        told_TD = self.asked.run(self._call.run(x_TD, batch, angles))
        x_TD += self._mix(self.norm1.run(x_TD + told_TD), batch, angles)
        return x_TD, None


def make_shared_blocks(
    blocks: Sequence[Block], ropes: Sequence[int], dim: int, context: LayerContext
) -> list[SharedBlock]:
    """All banks in order; ``ropes`` are the blocks' indices among the model's RopeTables."""
    calls: dict[int, list[SharedLayer]] = {}
    rope_of: dict[int, int] = {}
    for block, rope in zip(blocks, ropes, strict=True):
        if block.shared_block is not None:
            calls.setdefault(block.shared_block.bank, []).append(block.shared_block)
            rope_of[block.shared_block.bank] = rope
    return [SharedBlock(calls[bank], dim, context, rope_of[bank]) for bank in sorted(calls)]
