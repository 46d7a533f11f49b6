"""Softmax attention with grouped KV heads: projections, q/k norms, rope, gate.

Legend: T tokens, D model channels, H query heads, K KV heads, C head channels.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.base.record import replace
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.ops.fp8 import BLOCK
from radixlm.kernels.ops.rope import QkNorm
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.placement import ALL_HEADS, HeadCut, cut_heads
from radixlm.layers.program import (
    Branch,
    ProgramBuilder,
    Unsupported,
    handles,
    handles_norm,
    rotation_of,
)
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


def norm_shapes(spec: Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the weights of the norms of q and k."""
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    if spec.qk_norm == "row":
        return (heads * dim,), (kv_heads * dim,)
    if spec.qk_norm == "each":
        return (heads, dim), (kv_heads, dim)
    return (dim,), (dim,)


def heads_of(spec: Attention, context: LayerContext) -> HeadCut:
    """The heads of an attention that this rank computes. All where parts of the layer work on
    several heads at once."""
    extras = spec.extras
    is_joint = extras is not None and (
        extras.experts
        or extras.indexer is not None
        or extras.block_sparse is not None
        or extras.diff_lambda_init
        or extras.dynamic_mask_topk
        or extras.scaled_by_token
        or (extras.out_norm is not None and not extras.out_norm_heads)
    )
    if is_joint or spec.qk_norm == "row" or not context.cuts_heads:
        return ALL_HEADS
    if not context.cuts_kv_heads and context.ranks.attn.size > spec.kv_heads:
        return ALL_HEADS
    width = math.gcd(spec.head_dim, spec.v_dim)
    together = context.scheme.rows_together(BLOCK) // math.gcd(BLOCK, width)
    return cut_heads(spec.heads, spec.kv_heads, context.ranks.attn, max(together, 1))


def local_heads(spec: Attention, cut: HeadCut) -> Attention:
    """The attention with this rank's heads alone."""
    if not cut.heads:
        return spec
    (begin, end), extras = cut.own, spec.extras
    if extras is not None and extras.alibi_slopes:
        extras = replace(extras, alibi_slopes=extras.alibi_slopes[begin:end])
    return replace(spec, heads=end - begin, kv_heads=cut.kv[1] - cut.kv[0], extras=extras)


def head_norms(spec: Attention, cut: HeadCut, context: LayerContext) -> tuple[NormLayer, NormLayer]:
    """The norms of q and k of an attention with this rank's heads."""
    assert spec.qk_norm_spec is not None, "qk_norm needs qk_norm_spec"
    norms = []
    for shape, is_kv in zip(norm_shapes(spec), (False, True), strict=True):
        norm = NormLayer(spec.qk_norm_spec, shape, context.kernels, context.device)
        if spec.qk_norm == "each":
            norm.cut_heads(cut, is_kv)
        norms.append(norm)
    return norms[0], norms[1]


def qk_norm_of(spec: Attention, norms: tuple[NormLayer, NormLayer] | None) -> QkNorm | None:
    """The norms of q and k as the kernels take them, once their weights are loaded."""
    if norms is None or not spec.qk_norm or spec.qk_norm_spec is None:
        return None
    q, k = norms
    is_layer_norm = spec.qk_norm_spec.kind == "layer"
    weights = (q.weight_D, k.weight_D, q.bias_D, k.bias_D)
    return QkNorm(spec.qk_norm, is_layer_norm, spec.qk_norm_spec.eps, *weights)


def site_of(spec: Attention, pool: tuple[int, int], sinks: Tensor | None) -> AttentionSite:
    """The layer as its backend sees it; ``pool`` is (group, row)."""
    group, row = pool
    return AttentionSite(
        layer=row,
        group=group,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.k_row,
        v_dim=spec.v_dim,
        scale=spec.softmax_scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=sinks,
    )


def rows_of(spec: Attention) -> tuple[int, int, int]:
    """Outputs of the joined projections of q, k and v."""
    kv_rows = spec.kv_heads * spec.head_dim
    return spec.heads * spec.head_dim * (2 if spec.gate else 1), kv_rows, kv_rows


# fields of the record that layers emit
EMITTED = (
    *("heads", "kv_heads", "head_dim", "rope", "qkv_bias", "o_bias", "qk_norm", "qk_norm_spec"),
    *("scale", "window", "softcap", "sinks", "gate"),
)


def emit_gate_by_half(program: ProgramBuilder, spec: Attention, qkv: int, out: int) -> None:
    """``out *= sigmoid(gate)``; the gate is the second half of each head of q."""
    heads, width = (spec.heads, spec.head_dim), spec.head_dim
    program.gate(qkv, out, heads, "SIGMOID", offset=width, stride=2 * width)


class AttentionLayer(Module):
    """qkv -> norm -> rope -> paged attention -> gate -> o."""

    site: AttentionSite

    def __init__(
        self,
        spec: Attention,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        out_dim: int = 0,
    ) -> None:
        """``rope`` indexes the model's RopeTables (-1 without), ``pool`` is (group, row);
        ``out_dim`` are the output's channels where they are not the input's."""
        cut, whole = heads_of(spec, context), spec
        self.spec = spec = local_heads(whole, cut)
        self.rope_index, self._pool = rope, pool
        self._sigmoid = context.kernels.sigmoid
        self._prepare = context.kernels.prepare_qk
        self._interleaved = spec.rope is not None and spec.rope.interleaved
        self.rows, rows = rows_of(spec), rows_of(whole)
        head = spec.head_dim
        place = cut.place(head * (2 if spec.gate else 1), head, head)
        self.qkv = context.linear(dim, sum(rows), spec.qkv_bias, Shard(0, rows), place=place)
        width, out_dim = whole.heads * head, out_dim or dim
        place = context.after(cut.inputs(head), width, out_dim)
        self.o = context.linear(width, out_dim, spec.o_bias, Shard(1), place=place)
        if spec.qk_norm:
            self.q_norm, self.k_norm = head_norms(whole, cut, context)
        if spec.sinks:
            self.sinks = cut.cut(Param((whole.heads,), "float32", Shard(0)))

    def finish(self) -> None:
        norms = (self.q_norm, self.k_norm) if self.spec.qk_norm else None
        self.qk_norm = qk_norm_of(self.spec, norms)
        self.site = site_of(self.spec, self._pool, self.sinks.take() if self.spec.sinks else None)

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        q, k, v, gate = self._project(x_TD)
        cos_sin = angles[self.rope_index] if self.rope_index >= 0 else None
        prepare = (self.qk_norm, cos_sin, self._interleaved)
        if batch.fused_attn is not None:
            out = batch.fused_attn.prepare_and_run(q, k, v, self.site, *prepare)
        else:
            self._prepare(q, k, *prepare)
            out = batch.attn.run(q, k, v, self.site)
        if gate is not None:
            out = out * self._sigmoid(gate)
        return self.o.run(out)

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """The same as operations of a program, up to the output projection."""
        spec, site, ext = self.spec, self.site, native()
        handles(spec, *EMITTED)
        handles_norm(spec.qk_norm_spec)
        if spec.gate and spec.qk_norm == "row":
            raise Unsupported("a row norm of gated queries")
        q_head = spec.head_dim * (2 if spec.gate else 1)
        qkv = self._emit_qkv(program, source)
        offsets = (0, self.rows[0], self.rows[0] + self.rows[1])
        rotation = rotation_of(self.rope_index, spec.rope)
        parts = ext.STORE_Q | ext.STORE_K | ext.STORE_CACHE
        program.store(qkv, offsets, site, q_head, self.qk_norm, rotation, parts)
        width = spec.heads * spec.head_dim
        out = program.buffer("attended", width)
        program.attend(site, qkv, out, q_head)
        if spec.gate:
            emit_gate_by_half(program, spec, qkv, out)
        return [Branch(out, width, self.o)]

    def _emit_qkv(self, program: ProgramBuilder, source: int) -> int:
        return program.project(self.qkv, source, "qkv")

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q [T, H, C], k and v [T, K, C], and the gate [T, H * C]."""
        spec, gate = self.spec, None
        q, k, v = self.qkv.run(x_TD).split_with_sizes(self.rows, -1)
        if spec.gate:  # each head's q, then its gate
            q, gate = q.view(-1, spec.heads, 2 * spec.head_dim).chunk(2, -1)
            gate = gate.flatten(1)
            q = q.flatten(1)
        q = q.view(-1, spec.heads, spec.head_dim)
        k = k.view(-1, spec.kv_heads, spec.head_dim)
        return q, k, v.view(-1, spec.kv_heads, spec.head_dim), gate
