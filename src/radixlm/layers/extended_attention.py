"""Attention with the parts of ``spec.AttentionExtras``: ALiBi, clamps, chunks, other value widths,
output gates, norms at other places, keys and values of an earlier layer.

Legend: T tokens, D model channels, H query heads, K KV heads, C channels of q and k, V of v.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from radixlm.arch.spec import Attention, Norm
from radixlm.base.record import replace
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.ops.activation import softplus
from radixlm.layers.attention import (
    EMITTED,
    emit_gate_by_half,
    head_norms,
    heads_of,
    local_heads,
    qk_norm_of,
    site_of,
)
from radixlm.layers.block_indexer import BlockIndexerLayer, MeanBlockIndexer
from radixlm.layers.context import LayerContext
from radixlm.layers.dual_chunk import DualChunkAttention
from radixlm.layers.dynamic_mask import DynamicMask
from radixlm.layers.gathered_attention import (
    QueryChunk,
    attend_chosen,
    attend_gathered,
    block_sparse_choice,
    causal_choice,
    chunk_choice,
)
from radixlm.layers.logn_scaling import TokenScaling, logn_scales
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.placement import HeadCut
from radixlm.layers.program import (
    Branch,
    ProgramBuilder,
    Rotation,
    Unsupported,
    handles,
    handles_norm,
    rotation_of,
)
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch

GATES = {
    "sigmoid": "SIGMOID",
    "softplus": "SOFTPLUS",
    "sigmoid2": "TWICE_SIGMOID",
    "silu": "SILU",
}
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class ExtendedAttentionLayer(Module):
    """qkv -> clamp -> norm and rope in either order -> paged attention -> norm, gate -> o."""

    site: AttentionSite

    def __init__(
        self, spec: Attention, dim: int, context: LayerContext, rope: int, pool: tuple[int, int]
    ) -> None:
        """``rope`` indexes the model's RopeTables (-1 without), ``pool`` is (group, row)."""
        assert spec.extras is not None
        cut, whole = heads_of(spec, context), spec
        self.spec = spec = local_heads(whole, cut)
        assert spec.extras is not None
        self.extras, self.rope_index, self._pool = spec.extras, rope, pool
        self._kernels, self._device = context.kernels, context.device
        self._make_projections(whole, cut, dim, context)
        if spec.qk_norm:
            self.q_norm, k_norm = head_norms(whole, cut, context)
            if not self._reads:
                self.k_norm = k_norm
        if self.extras.v_norm is not None and not self._reads:
            self.v_norm = self._norm(self.extras.v_norm, (spec.v_dim,))
        if self.extras.out_norm is not None:
            width = spec.v_dim if self.extras.out_norm_heads else spec.heads * spec.v_dim
            self.out_norm = self._norm(self.extras.out_norm, (width,))
        if spec.sinks:
            self.sinks = cut.cut(Param((whole.heads,), "float32", Shard(0)))
        if self.extras.dynamic_mask_topk:
            self.values = DynamicMask(spec, self.extras.dynamic_mask_topk, context)
        if self.extras.scaled_by_token:
            self.scaling = TokenScaling(spec.heads, sum(self.rows), context)
        if self.extras.indexer is not None:
            kind = MeanBlockIndexer if self.extras.indexer.is_mean else BlockIndexerLayer
            self.index: BlockIndexerLayer = kind(spec, self.extras.indexer, dim, context)

    @property
    def _own_v_dim(self) -> int:
        """Channels of a projected value: half of a value in differential attention."""
        return self.spec.v_dim // 2 if self.extras.diff_lambda_init else self.spec.v_dim

    @property
    def _reads(self) -> bool:
        """Whether the layer reads the keys and values of another one."""
        return self.extras.kv_from is not None

    def _norm(self, spec: Norm, shape: tuple[int, ...]) -> NormLayer:
        return NormLayer(spec, shape, self._kernels, self._device)

    def _make_projections(
        self, whole: Attention, cut: HeadCut, dim: int, context: LayerContext
    ) -> None:
        """``whole``: the attention of all ranks."""
        extras, q_head = self.extras, whole.head_dim * (2 if whole.gate else 1)
        widths: tuple[int, ...] = () if self._reads else (whole.head_dim, self._own_v_dim)
        if extras.k_is_v:
            widths = widths[:1]
        if extras.q_rank:
            assert extras.q_rank_norm is not None, "q_rank needs q_rank_norm"
            rows, own = whole.heads * q_head, cut.place(q_head)
            self.q_a = context.linear(dim, extras.q_rank)
            self.q_a_norm = self._norm(extras.q_rank_norm, (extras.q_rank,))
            self.q_b = context.linear(extras.q_rank, rows, shard=Shard(0), place=own)
            q_head = 0
        self.rows, rows_of_all = (
            ((spec.heads * q_head,) if q_head else ()) + tuple(spec.kv_heads * w for w in widths)
            for spec in (self.spec, whole)
        )
        linear = context.linear(
            dim, sum(rows_of_all), whole.qkv_bias, Shard(0, rows_of_all),
            place=cut.place(q_head, *widths),
        )  # fmt: skip
        # the role, which selects the checkpoint's names, depends on which of q, k, v are projected
        roles = {1: "q", 2: "kv" if extras.q_rank else "qk", 3: "qkv"}
        setattr(self, roles[len(self.rows)], linear)
        self._project = linear
        width = whole.heads * self._own_v_dim
        after = context.after(cut.inputs(self._own_v_dim), width, dim)
        self.o = context.linear(width, dim, whole.o_bias, Shard(1), place=after)
        if extras.diff_lambda_init:
            for name in LAMBDAS:
                setattr(self, name, Param((whole.head_dim,), "float32"))
        if extras.gate:
            # whole on each rank: torch's functions round the last numbers of a row in their own way
            each = whole.v_dim if extras.gate == "channel" else 1
            self.gate = context.linear(dim, whole.heads * each, extras.gate_bias, Shard(0))
            self._gates_at = cut.own[0] * each if cut.heads else 0

    def children(self) -> Iterator[tuple[str, Module]]:
        """Without ``_project``, which is another name of a child."""
        return ((name, child) for name, child in super().children() if name != "_project")

    def finish(self) -> None:
        spec, extras = self.spec, self.extras
        self._choose = None
        if extras.block_sparse:
            self._choose = block_sparse_choice(extras.block_sparse, spec.heads)
        elif extras.chunk_lookback:
            self._choose = chunk_choice(extras.attention_chunk_size, extras.chunk_lookback)
        self._runs = (1, 1)
        if extras.block_sparse is not None:
            self._runs = (spec.heads, extras.block_sparse.size)
        elif extras.indexer is not None:
            index = extras.indexer
            self._runs = (1 if index.is_mean else index.heads, index.size)
        self._dual = None
        if extras.dual_chunk is not None and spec.rope is not None:
            self._dual = DualChunkAttention(extras.dual_chunk, spec.rope, self._kernels)
        if extras.diff_lambda_init:
            q1, k1, q2, k2 = (vars(self)[name].take() for name in LAMBDAS)
            self._lambda = (
                (q1 * k1).sum().exp() - (q2 * k2).sum().exp()
            ).item() + extras.diff_lambda_init
        norms = None
        if spec.qk_norm and spec.qk_norm_spec is not None:
            norms = (self.q_norm, self.q_norm if self._reads else self.k_norm)
        self.qk_norm = qk_norm_of(spec, norms)
        self.site = replace(
            site_of(spec, self._pool, self.sinks.take() if spec.sinks else None),
            chunk=extras.attention_chunk_size,
            slopes=torch.tensor(extras.alibi_slopes, device=self._device)
            if extras.alibi_slopes
            else None,
            stores=not self._reads,
            looks_ahead=not extras.is_causal,
        )

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        extras = self.extras
        q, k, v, gate = self._heads(x_TD, batch.positions_T)
        cos_sin = angles[self.rope_index] if self.rope_index >= 0 else None
        raw = q.clone() if self._dual is not None else q
        # a layer that reads another's keys rotates an empty slice of q in their place
        self._apply_rope(q, q[:, :0] if k is None else k, cos_sin)
        if self._dual is not None and batch.max_kv_len > self._dual.plain_len:
            turn = partial(self._turned, raw)
            out = self._dual.attend(q, k, v, turn, self.site, batch)
            return self.o.run(self._finished(out, x_TD, gate))
        if extras.logn_scaling is not None:
            q = q * logn_scales(extras.logn_scaling, batch.positions_T)[:, None, None]
        if extras.k_scale != 1.0 and k is not None:
            k = k * extras.k_scale
        choose = self._choose
        if extras.indexer is not None and k is not None:
            k = self.index.append_key(k, x_TD, cos_sin)
            choose = self.index.chooser(x_TD, cos_sin, batch)
        if extras.dynamic_mask_topk:
            mask = self.values
            out = attend_gathered(q, k, v, self.site, batch, mask.choose, mask.bias)
        elif extras.alibi_of_root:
            out = attend_gathered(q, k, v, self.site, batch, causal_choice, self._root_bias)
        elif choose is None:
            out = batch.attn.run(q, k, v, self.site)
        else:
            out = attend_chosen(q, k, v, self.site, batch, choose, self._runs)
        return self.o.run(self._finished(out, x_TD, gate))

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """The same as operations of a program, up to the output projection."""
        spec, extras, site = self.spec, self.extras, self.site
        self._check_emitted()
        kv_rows = (spec.kv_heads * spec.head_dim, spec.kv_heads * spec.v_dim)
        q_head = spec.head_dim * (2 if spec.gate else 1)
        q_rows = spec.heads * q_head
        width = q_rows if self._reads else q_rows + sum(kv_rows)
        qkv = program.buffer("qkv", width)
        if extras.diff_lambda_init:
            self._emit_wide_values(program, source, qkv)
        else:
            program.linear(self._project.packed, source, qkv)
        offsets = (0, q_rows, q_rows + kv_rows[0])
        if extras.clip_qkv and not extras.clip_after_norm:
            program.ops.scale(y=qkv, offset=0, dim=sum(self.rows), cap=extras.clip_qkv)
        if not self._reads:
            self._emit_values(program, qkv, offsets)
        self._emit_rotation(program, qkv, offsets, q_head)
        if extras.logn_scaling is not None:
            heads = (spec.heads, spec.head_dim, q_head)
            program.scale_queries(extras.logn_scaling, qkv, heads)
        out_width = spec.heads * spec.v_dim
        out = program.buffer("attended", out_width)
        program.attend(site, qkv, out, q_head)
        if extras.diff_lambda_init:
            out_width //= 2
            second = torch.arange(out_width, 2 * out_width, dtype=torch.int32)
            other, index = program.buffer("second half", out_width), program.hold(second)
            program.ops.columns(x=out, y=other, index=index, dim=out_width, selected=False)
            program.ops.add(x=other, y=out, dim=out_width, scale=-self._lambda)
        self._emit_finished(program, source, qkv, out)
        return [Branch(out, out_width, self.o)]

    def _emit_wide_values(self, program: ProgramBuilder, source: int, qkv: int) -> None:
        """The projections, where each value of the two halves of the heads stands beside its
        counterpart, for both."""
        heads, width, first = self.spec.kv_heads, self._own_v_dim, sum(self.rows[:2])
        narrow = program.buffer("narrow qkv", sum(self.rows))
        program.linear(self._project.packed, source, narrow)
        values_KV = torch.arange(first, sum(self.rows)).view(heads, width)
        wide = [half.repeat(2, 1) for half in values_KV.chunk(2)]
        index = torch.cat((torch.arange(first), torch.cat(wide, -1).flatten())).int()
        held, dim = program.hold(index), len(index)
        program.ops.columns(x=narrow, y=qkv, index=held, dim=dim, selected=False)

    def _check_emitted(self) -> None:
        spec, extras = self.spec, self.extras
        handles(spec, *EMITTED, "extras")
        handles(
            extras, "v_dim", "alibi_slopes", "attention_chunk_size", "clip_qkv",
            "clip_after_norm", "norm_after_rope", "logn_scaling", "out_norm", "out_norm_heads",
            "v_norm", "v_scale", "k_scale", "out_scale", "kv_from", "k_is_v", "gate", "gate_act",
            "gate_bias", "is_causal", "diff_lambda_init",
        )  # fmt: skip
        handles_norm(spec.qk_norm_spec)
        if spec.gate and (spec.qk_norm == "row" or extras.clip_after_norm):
            raise Unsupported("a row norm or a late clamp of gated queries")
        if extras.k_is_v and extras.v_norm is None:
            raise Unsupported("AttentionExtras.k_is_v without v_norm")
        if extras.diff_lambda_init and (self._reads or extras.clip_qkv):
            raise Unsupported("differential attention that reads other keys or clamps its own")

    def _emit_values(
        self, program: ProgramBuilder, qkv: int, offsets: tuple[int, int, int]
    ) -> None:
        """Norm, clamp and scale of v before it is stored; v may be k, normed."""
        spec, extras, (_, k, v) = self.spec, self.extras, offsets
        if extras.v_norm is not None:
            self.v_norm.emit_heads(program, qkv, k if extras.k_is_v else v, v, spec.kv_heads)
        numbers = spec.kv_heads * spec.v_dim
        if extras.clip_after_norm:
            program.ops.scale(y=qkv, offset=v, dim=numbers, cap=extras.clip_qkv)
        if extras.v_scale != 1.0:
            program.ops.scale(y=qkv, offset=v, dim=numbers, scale=extras.v_scale)

    def _emit_rotation(
        self, program: ProgramBuilder, qkv: int, offsets: tuple[int, int, int], q_head: int
    ) -> None:
        """Norm and rotation in the record's order, clamps and scales between, then the store."""
        extras, ext, reads = self.extras, native(), self._reads
        norm, rotation = self.qk_norm, rotation_of(self.rope_index, self.spec.rope)
        heads = ext.STORE_Q if reads else ext.STORE_Q | ext.STORE_K
        numbers = offsets[1] if reads else offsets[2]
        scales_k = extras.k_scale != 1.0 and not reads
        steps = [(norm, rotation)]
        if extras.norm_after_rope:
            steps = [(None, rotation), (norm, Rotation())]
        elif extras.clip_after_norm:
            steps = [(norm, Rotation()), (None, rotation)]
        if scales_k:
            steps.append((None, Rotation()))
        for i, (own_norm, own_rotation) in enumerate(steps):
            is_last = i == len(steps) - 1
            if i and extras.clip_after_norm:
                program.ops.scale(y=qkv, offset=0, dim=numbers, cap=extras.clip_qkv)
            if is_last and scales_k:
                dim = offsets[2] - offsets[1]
                program.ops.scale(y=qkv, offset=offsets[1], dim=dim, scale=extras.k_scale)
            parts = heads | ext.STORE_CACHE if is_last and not reads else heads
            program.store(qkv, offsets, self.site, q_head, own_norm, own_rotation, parts)

    def _emit_finished(self, program: ProgramBuilder, source: int, qkv: int, out: int) -> None:
        """Scale, norm and gates of the heads' output."""
        spec, extras = self.spec, self.extras
        if extras.out_scale != 1.0:
            dim = spec.heads * spec.v_dim
            program.ops.scale(y=out, offset=0, dim=dim, scale=extras.out_scale)
        if extras.out_norm is not None and extras.out_norm_heads:
            heads_left = spec.heads // (2 if extras.diff_lambda_init else 1)
            self.out_norm.emit_heads(program, out, 0, 0, heads_left)
        elif extras.out_norm is not None:
            self.out_norm.emit(program, out, out)
        if extras.diff_lambda_init:
            share, width = 1 - extras.diff_lambda_init, spec.heads * spec.v_dim // 2
            program.ops.scale(y=out, offset=0, dim=width, scale=share)
        if spec.gate:
            emit_gate_by_half(program, spec, qkv, out)
        if extras.gate:
            gates, heads = program.project(self.gate, source, "gates"), (spec.heads, spec.v_dim)
            act = GATES[extras.gate_act]
            at, per_head = self._gates_at, extras.gate == "head"
            program.gate(gates, out, heads, act, per_head=per_head, offset=at)

    def _heads(
        self, x_TD: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """q [T, H, C], k [T, K, C], v [T, K, V] and the gate [T, H * C] of a doubled q."""
        spec, extras = self.spec, self.extras
        projected = self._project.run(x_TD)
        if extras.clip_qkv and not extras.clip_after_norm:
            projected = projected.clamp(-extras.clip_qkv, extras.clip_qkv)
        kv = list(projected.split_with_sizes(self.rows, -1))
        q = self._low_rank(x_TD) if extras.q_rank else kv.pop(0)
        gate = None
        if spec.gate:
            q, gate = q.view(-1, spec.heads, 2 * spec.head_dim).chunk(2, -1)
            q, gate = q.contiguous(), gate.flatten(1)
        q = q.reshape(-1, spec.heads, spec.head_dim)
        if not kv:
            return q, None, None, gate
        k = kv[0].reshape(-1, spec.kv_heads, spec.head_dim)
        v = k.clone() if extras.k_is_v else kv[1].reshape(-1, spec.kv_heads, self._own_v_dim)
        if (
            extras.diff_lambda_init
        ):  # each half of the heads has its own values, then the other half's
            halves = v.chunk(2, 1)
            v = torch.cat([half.repeat(1, 2, 1) for half in halves], -1)
        if extras.scaled_by_token:
            q, v = self.scaling.run(projected, q, v, positions_T)
        if extras.v_norm is not None:
            v = self.v_norm.run(v.contiguous())
        if extras.clip_after_norm:
            v = v.clamp(-extras.clip_qkv, extras.clip_qkv)
        return q, k, v if extras.v_scale == 1.0 else v * extras.v_scale, gate

    def _root_bias(self, chunk: QueryChunk) -> Tensor:
        """ALiBi of the distance's square root: float32 [H, Q, N]."""
        assert self.site.slopes is not None
        roots_QN = chunk.distance_QN.clamp(min=0).float().sqrt()
        return -self.site.slopes[:, None, None] * roots_QN

    def _low_rank(self, x_TD: Tensor) -> Tensor:
        """q by a low-rank projection: [T, H * C]."""
        return self.q_b.run(self.q_a_norm.run(self.q_a.run(x_TD)))

    def _turned(self, q_THC: Tensor, angles: Angles) -> Tensor:
        """Queries before norm and rotation, with other angles."""
        q = q_THC.clone()
        self._apply_rope(q, q.new_empty(q.shape[0], 0, q.shape[2]), angles)
        return q

    def _apply_rope(self, q: Tensor, k: Tensor, cos_sin: Angles | None) -> None:
        interleaved = self.spec.rope is not None and self.spec.rope.interleaved
        prepare = self._kernels.prepare_qk
        if self._reads:
            k = q.new_empty(q.shape[0], 1, q.shape[2]) if self.spec.qk_norm != "row" else q.clone()
            k.zero_()
        if self.extras.norm_after_rope:
            if cos_sin is not None and cos_sin.shape[1] > q.shape[2]:
                self._apply_rope_by_channel(q, k, cos_sin)
            else:
                prepare(q, k, None, cos_sin, interleaved)
            prepare(q, k, self.qk_norm, None, False)
        elif self.extras.clip_after_norm:
            prepare(q, k, self.qk_norm, None, False)
            for tensor in (q, k):
                tensor.clamp_(-self.extras.clip_qkv, self.extras.clip_qkv)
            prepare(q, k, None, cos_sin, interleaved)
        else:
            prepare(q, k, self.qk_norm, cos_sin, interleaved)

    def _apply_rope_by_channel(self, q: Tensor, k: Tensor, cos_sin: Angles) -> None:
        """Rotate the first and the second channel of a pair by different angles."""
        first, second = (part.contiguous() for part in cos_sin.chunk(2, -1))
        others = q.clone(), k.clone()
        self._kernels.prepare_qk(q, k, None, first, False)
        self._kernels.prepare_qk(*others, None, second, False)
        for own, other in zip((q, k), others, strict=True):
            half = own.shape[-1] // 2
            own[..., half:] = other[..., half:]

    def _finished(self, out_TE: Tensor, x_TD: Tensor, own_gate: Tensor | None) -> Tensor:
        """Scale, norm and gates of the heads' output, [T, H * V]."""
        spec, extras = self.spec, self.extras
        if extras.out_scale != 1.0:
            out_TE = out_TE * extras.out_scale
        if extras.diff_lambda_init:
            first, second = out_TE.view(-1, spec.heads, spec.v_dim).chunk(2, 1)
            out_TE = (first - self._lambda * second).flatten(1)
        if extras.out_norm is not None:
            width = spec.v_dim if extras.out_norm_heads else spec.heads * spec.v_dim
            out_TE = self.out_norm.run(out_TE.reshape(-1, width)).view(out_TE.shape)
        if extras.diff_lambda_init:
            out_TE = out_TE * (1 - extras.diff_lambda_init)
        if own_gate is not None:
            out_TE = out_TE * self._kernels.sigmoid(own_gate)
        if extras.gate:
            gate = self._opened(self.gate.run(x_TD))
            heads = out_TE.view(-1, spec.heads, spec.v_dim)
            each = 1 if extras.gate == "head" else spec.v_dim
            gate = gate.narrow(1, self._gates_at, spec.heads * each).reshape(-1, spec.heads, each)
            out_TE = (heads * gate).flatten(1)
        return out_TE

    def _opened(self, raw: Tensor) -> Tensor:
        act = self.extras.gate_act
        if act == "softplus":
            return softplus(raw.float()).to(raw.dtype)
        gate = self._kernels.sigmoid(raw)
        if act == "silu":
            return gate * raw
        return gate * 2 if act == "sigmoid2" else gate
