"""A decoder layer whose weights several blocks share (``spec.SharedLayer``), and the blocks that
call it: their mixer reads norm(x + matrix(layer([x; embedding]))).

Legend: T packed tokens, D model channels, H query heads, K KV heads, C head channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from radixlm.arch.spec import Block, SharedLayer
from radixlm.base.record import replace
from radixlm.kernels.cpu.linear import act_code
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.mixers import emit_mixer
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import (
    NOWHERE,
    ProgramBuilder,
    ProgramStream,
    Target,
    handles,
    struct,
)
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.quant.param import Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


class LowRankAdapter(Module):
    """b(a(x)), which a call adds to a projection."""

    def __init__(self, rank: int, inputs: int, outputs: int, context: LayerContext) -> None:
        self.a = context.plain_linear(inputs, rank)
        self.b = context.plain_linear(rank, outputs)

    def run(self, x_TD: Tensor) -> Tensor:
        """The change: [T, outputs]."""
        return self.b.run(self.a.run(x_TD))

    def emit(self, program: ProgramBuilder, source: int, target: int, offset: int = 0) -> None:
        """Add the change to the target's columns from ``offset`` on."""
        low = program.project(self.a, source, "low")
        program.linear(self.b.packed, low, target, residual=target, offset=offset)


class CallAdapters(Module):
    """The low-rank adapters of one call."""

    def __init__(self, spec: SharedLayer, dim: int, context: LayerContext) -> None:
        attention = spec.attention
        self.changes_qkv = spec.changes_qkv
        self.up = LowRankAdapter(spec.rank, dim, 2 * spec.ffn.inner, context)
        if spec.changes_qkv:
            heads = (attention.heads, attention.kv_heads, attention.kv_heads)
            self.qkv = [
                LowRankAdapter(spec.rank, 2 * dim, count * attention.head_dim, context)
                for count in heads
            ]

    def qkv_delta(self, x_TD: Tensor) -> Tensor | None:
        """What is added to q, k and v, one after another; None without adapters."""
        return torch.cat([one.run(x_TD) for one in self.qkv], -1) if self.changes_qkv else None


class SharedAttention(AttentionLayer):
    """Attention with the adapters of a call."""

    changes: CallAdapters | None = None

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        delta = self.changes.qkv_delta(x_TD) if self.changes is not None else None
        if delta is None:
            return super()._project(x_TD)
        spec = self.spec
        q, k, v = (self.qkv.run(x_TD) + delta).split_with_sizes(self.rows, -1)
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = (part.view(-1, spec.kv_heads, spec.head_dim) for part in (k, v))
        return q, k, v, None

    def _emit_qkv(self, program: ProgramBuilder, source: int) -> int:
        qkv = super()._emit_qkv(program, source)
        if self.changes is not None and self.changes.changes_qkv:
            for i, one in enumerate(self.changes.qkv):
                one.emit(program, source, qkv, sum(self.rows[:i]))
        return qkv


class SharedBlock(Module):
    """The weights of one shared layer, and the adapters of all its calls."""

    def __init__(
        self, calls: Sequence[SharedLayer], dim: int, context: LayerContext, rope: int
    ) -> None:
        spec = calls[0]
        kernels, device, inner = context.kernels, context.device, spec.ffn.inner
        assert spec.ffn.gated and not spec.attention.gate
        self.spec, self._activate = spec, kernels.activate
        self.norm1 = NormLayer(spec.norm, (2 * dim,), kernels, device)
        self.norm2 = NormLayer(spec.norm, (dim,), kernels, device)
        # a call's changes are made for all heads
        whole = replace(context, cuts_heads=False)
        self.attention = SharedAttention(spec.attention, 2 * dim, whole, rope, (-1, -1), dim)
        parts = Shard(0, (inner, inner))
        # gate and up stay apart from their activation: a call's changes come between
        self.up = context.linear(dim, 2 * inner, spec.ffn.bias, parts)
        self.down = context.linear(inner, dim, spec.ffn.bias, Shard(1))
        self.changes = [CallAdapters(call, dim, context) for call in calls if call.rank]

    def make_call(self, number: int, place: tuple[int, int]) -> SharedBlockCall:
        """The layer as call ``number`` runs it, with keys and values at ``place`` (group, row)."""
        return SharedBlockCall(self, self.changes[number] if self.changes else None, place)

    def feed(self, x_TD: Tensor, changes: CallAdapters | None) -> Tensor:
        """The feed-forward: [T, D]."""
        both = self.up.run(x_TD)
        if changes is not None:
            both = both + changes.up.run(x_TD)
        gate, up = both.chunk(2, -1)
        return self.down.run(self._activate(gate.contiguous(), self.spec.ffn.act) * up)

    def emit_feed(self, program: ProgramBuilder, x: int, changes: CallAdapters | None) -> int:
        """The feed-forward's outcome in a buffer."""
        ffn = self.spec.ffn
        both = program.project(self.up, x, "gate and up")
        if changes is not None:
            changes.up.emit(program, x, both)
        args = struct("ActArgs", dim=ffn.inner, act=act_code(f"{ffn.act}_mul", True), gated=1)
        up = program.buffer("up", ffn.inner)
        program.ops.activation(x=both, y=up, args=args, selected=False)
        return program.project(self.down, up, "shared fed")


class SharedBlockCall:
    """One call of a shared layer; not part of the tree that is loaded."""

    def __init__(
        self, layer: SharedBlock, changes: CallAdapters | None, place: tuple[int, int]
    ) -> None:
        group, row = place
        self._layer, self._changes = layer, changes
        self._attention = copy(layer.attention)
        self._attention.changes = changes
        self._attention.site = replace(layer.attention.site, group=group, layer=row)

    @property
    def site(self) -> AttentionSite:
        """The site of the call's attention."""
        return self._attention.site

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The layer's output: [T, D]."""
        assert batch.scratch.embeds_TD is not None
        layer = self._layer
        both_T2D = torch.cat((x_TD, batch.scratch.embeds_TD), -1)
        h_TD = self._attention.run(layer.norm1.run(both_T2D), batch, angles)
        return layer.feed(layer.norm2.run(h_TD), self._changes)

    def emit(self, program: ProgramBuilder, residual: int) -> int:
        """The layer's outcome in a buffer."""
        layer, dim = self._layer, program.dim
        handles(
            layer.spec, "bank", "call", "attention", "ffn", "norm", "rank", "changes_qkv"
        )  # fmt: skip
        handles(layer.spec.ffn, "inner", "act", "bias")
        both = program.buffer("both", 2 * dim)
        program.ops.copy(x=residual, y=both, dim=dim)
        program.ops.copy(x=program.buffer("embeddings"), y=both, dim=dim, y_offset=dim)
        layer.norm1.emit(program, both, both)
        h = program.buffer("shared h")
        program.add_branches(self._attention.emit(program, both), Target(h))
        return layer.emit_feed(program, layer.norm2.emit(program, h, h), self._changes)


class SharedBlockCaller(WholeBlock):
    """A block whose mixer also reads the output of a shared layer."""

    def __init__(self, spec: Block, dim: int, context: LayerContext, state_row: int) -> None:
        super().__init__(replace(spec, shared_block=None), dim, context, -1, (-1, -1), state_row)
        assert spec.layout == "pre" and spec.ffn is None and spec.mixer is not None
        self.asked = context.linear(dim, dim)

    def bind(self, call: SharedBlockCall) -> None:
        """Set the call that the block makes, after loading."""
        self._call = call

    @property
    def site(self) -> AttentionSite:
        """The site of the shared layer's call."""
        return self._call.site

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``."""
        shared_TD = self.asked.run(self._call.run(x_TD, batch, angles))
        x_TD += self._mix(self.norm1.run(x_TD + shared_TD), batch, angles)
        return x_TD

    def emit(self, program: ProgramBuilder, stream: ProgramStream, is_last: bool) -> None:
        """See ``BlockLayer``."""
        handles(self.spec, "mixer", "ffn", "norm", "residual")
        residual = stream.residual
        shared = program.project(self.asked, self._call.emit(program, residual), "shared")
        program.ops.add(x=residual, y=shared, dim=program.dim)
        assert self.mixer is not None
        branches = emit_mixer(self.mixer, program, self.norm1.emit(program, shared, shared))
        if is_last:
            branches, _ = self._select(program, stream, branches, NOWHERE)
        target = Target(stream.residual, True, self.spec.residual, stream.selected)
        program.add_branches(branches, target)


def make_shared_blocks(
    blocks: Sequence[Block], ropes: Sequence[int], dim: int, context: LayerContext
) -> list[SharedBlock]:
    """All shared layers in order; ``ropes`` are the blocks' indices in the model's RopeTables."""
    calls: dict[int, list[SharedLayer]] = {}
    rope_of: dict[int, int] = {}
    for block, rope in zip(blocks, ropes, strict=True):
        if block.shared_block is not None:
            calls.setdefault(block.shared_block.bank, []).append(block.shared_block)
            rope_of[block.shared_block.bank] = rope
    return [SharedBlock(calls[bank], dim, context, rope_of[bank]) for bank in sorted(calls)]
