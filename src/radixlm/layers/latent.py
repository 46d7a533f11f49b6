"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in absorbed form: the cache holds
one latent of ``kv_rank + rope_dim`` numbers a token, and kv_b is folded into q and the output.

Legend: T tokens, D model channels, H heads, N no-rope channels, R rope channels, V value
channels, L the latent's rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import LatentAttention
from radixlm.base.record import replace
from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.ops.fp8 import BLOCK
from radixlm.kernels.ops.linear import HeadLinear as PackedHeads
from radixlm.kernels.ops.lora import LoraPart
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import attend_chosen
from radixlm.layers.indexer import IndexerLayer, PooledIndexer, shared_choice
from radixlm.layers.linear import StepAdapters
from radixlm.layers.logn_scaling import LearnedLogScaling, logn_scales
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.placement import ALL_HEADS, HeadCut, Placement, cut_heads
from radixlm.layers.program import (
    Branch,
    ProgramBuilder,
    Unsupported,
    handles,
    rotation_of,
    struct,
)
from radixlm.layers.rope import Angles
from radixlm.quant.param import Cut, Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


def latent_heads(spec: LatentAttention, context: LayerContext) -> HeadCut:
    """The heads that this rank computes; the latents are the same on all ranks."""
    widths = (spec.nope_dim + spec.rope_dim + spec.v_dim * spec.gate_from_q, spec.v_dim)
    if context.scheme.rows_together(BLOCK) > 1 and any(width % BLOCK for width in widths):
        return ALL_HEADS
    return cut_heads(spec.heads, spec.heads, context.ranks.attn)


class LatentAttentionLayer(Module):
    """q . (W_k c) = (W_k^T q) . c: attention runs over the latents as one shared KV head."""

    site: AttentionSite

    def __init__(
        self,
        spec: LatentAttention,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        out_dim: int = 0,
    ) -> None:
        """``out_dim``: the output's channels where they are not the input's."""
        cut, whole = latent_heads(spec, context), spec
        if cut.heads:
            spec = replace(whole, heads=cut.own[1] - cut.own[0])
        self.spec, self.rope_index, self._pool, self._context = spec, rope, pool, context
        kernels, device, num_heads = context.kernels, context.device, whole.heads
        query = spec.nope_dim + spec.rope_dim
        if spec.q_rank:
            self.q_a = context.linear(dim, spec.q_rank, spec.bias)
            self.q_a_norm = NormLayer(spec.norm, (spec.q_rank,), kernels, device)
            read = spec.q_rank * (1 + spec.gate_from_q)
            query += spec.v_dim * spec.gate_from_q
            place = cut.place(query)
            self.q_b = context.linear(read, num_heads * query, shard=Shard(0), place=place)
        else:
            place = cut.place(query)
            self.q = context.linear(dim, num_heads * query, shard=Shard(0), place=place)
        if spec.latents != "borrows":
            self.kv_a = context.linear(dim, spec.kv_rank + spec.rope_dim, spec.bias)
            self.kv_a_norm = NormLayer(spec.norm, (spec.kv_rank,), kernels, device)
        self.kv_b = UpProjection(spec, cut.place(spec.nope_dim + spec.v_dim), num_heads, context)
        width = num_heads * spec.v_dim
        after = context.after(cut.inputs(spec.v_dim), width, out_dim or dim)
        self.o = context.linear(width, out_dim or dim, spec.bias, Shard(1), place=after)
        if spec.rope_norm is not None:
            self.k_rope_norm = NormLayer(spec.rope_norm, (spec.rope_dim,), kernels, device)
        if spec.sinks:
            self.sinks = cut.cut(Param((num_heads,), "float32", Shard(0)))
        if spec.log_scaling:
            self.log_scaling = LearnedLogScaling(
                *(cut.cut(Param((num_heads,), "float32", Shard(0))) for _ in range(2))
            )
        if spec.gate:
            each = spec.v_dim if spec.gate == "channel" else 1
            place = cut.place(each)
            self.gate = context.linear(dim, num_heads * each, shard=Shard(0), place=place)
        if spec.indexer is not None and not spec.indexer.is_shared:
            kind = PooledIndexer if spec.indexer.pool else IndexerLayer
            self.index = kind(spec, spec.indexer, dim, context)

    def finish(self) -> None:
        spec, (group, row) = self.spec, self._pool
        self.site = AttentionSite(
            layer=row,
            group=group,
            heads=spec.heads,
            kv_heads=1,
            head_dim=spec.row,
            v_dim=spec.kv_rank,
            scale=spec.scale,
            window=spec.window,
            sinks=self.sinks.take() if spec.sinks else None,
            latent=True,
        )

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        spec, rotate = self.spec, self._context.kernels.rope
        cos_sin = angles[self.rope_index] if self.rope_index >= 0 else None
        low_TQ, q_THC, gate_THV = self._queries(x_TD)
        q_THN, q_THR = q_THC.split_with_sizes((spec.nope_dim, spec.rope_dim), -1)
        if cos_sin is not None and spec.rope is not None:
            rotate(q_THR, cos_sin, spec.rope.interleaved)
        k_T1C = self._latents(x_TD, batch, cos_sin)[:, None]
        q_THC = torch.cat((self.kv_b.absorb(q_THN), q_THR), -1)
        if spec.log_scaling:
            q_THC = self.log_scaling.run(q_THC, batch.positions_T)
        if spec.logn_scaling is not None:
            grown_T = logn_scales(spec.logn_scaling, batch.positions_T)
            q_THC = q_THC * grown_T[:, None, None].to(q_THC.dtype)
        if spec.indexer is None:
            out_THL = batch.attn.run(q_THC, k_T1C, None, self.site)
        elif spec.indexer.is_shared:
            out_THL = attend_chosen(q_THC, k_T1C, None, self.site, batch, shared_choice(batch))
        else:
            k_T1C = torch.cat((k_T1C, self.index.keys(x_TD, cos_sin)[:, None]), -1)
            choose = self.index.chooser(x_TD, low_TQ, cos_sin, batch)
            out_THL = attend_chosen(q_THC, k_T1C, None, self.site, batch, choose)
        out_TV = self.kv_b.expand(out_THL.view(-1, spec.heads, spec.kv_rank))
        if gate_THV is not None:
            out_TV = out_TV * self._context.kernels.sigmoid(gate_THV.flatten(1))
        return self.o.run(self._gated(out_TV, x_TD) if spec.gate else out_TV)

    def _latents(self, x_TD: Tensor, batch: ForwardBatch, cos_sin: Angles | None) -> Tensor:
        """The rows of the cache, without the indexer's: [T, L + R]."""
        spec, kept = self.spec, batch.scratch.latents
        if spec.latents == "borrows":
            return kept[spec.rope_dim]
        latent_TL, k_TR = self.kv_a.run(x_TD).split_with_sizes((spec.kv_rank, spec.rope_dim), -1)
        if spec.rope_norm is not None:
            k_TR = self.k_rope_norm.run(k_TR.contiguous())
        if cos_sin is not None and spec.rope is not None:
            self._context.kernels.rope(k_TR[:, None], cos_sin, spec.rope.interleaved)
        rows = torch.cat((self.kv_a_norm.run(latent_TL.contiguous()), k_TR), -1)
        if spec.latents == "keeps":
            kept[spec.rope_dim] = rows
        return rows

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """The same as operations of a program, up to the output projection."""
        spec, site = self.spec, self.site
        handles(
            spec, "heads", "nope_dim", "rope_dim", "v_dim", "kv_rank", "q_rank", "rope", "norm",
            "scale", "bias", "window", "sinks", "gate", "rope_norm", "logn_scaling",
        )  # fmt: skip
        q_head, row = spec.nope_dim + spec.rope_dim, spec.kv_rank + spec.rope_dim
        queries = self._emit_queries(program, source)
        latents = program.project(self.kv_a, source, "latents")
        self.kv_a_norm.emit(program, latents, latents)
        if spec.rope_norm is not None:
            self.k_rope_norm.emit(program, latents, latents, spec.kv_rank)
        absorbed = program.buffer("absorbed", spec.heads * row)
        self.kv_b.emit(program, self.kv_b.key, queries, absorbed, q_head, row)
        rotation = rotation_of(self.rope_index, spec.rope)
        args = struct(
            "StoreArgs", heads=spec.heads, head_dim=spec.rope_dim, q_head=q_head,
            k_lead=spec.kv_rank, rotary=rotation.dim, interleaved=int(rotation.interleaved),
            cache=program.cache(site),
        )  # fmt: skip
        program.ops.latent_store(
            q=queries, kv=latents, absorbed=absorbed, args=args, rope=rotation.rope,
            group=site.group,
        )  # fmt: skip
        if spec.logn_scaling is not None:
            program.scale_queries(spec.logn_scaling, absorbed, (spec.heads, row, row))
        averaged = program.buffer("averaged", spec.heads * spec.kv_rank)
        program.attend(site, absorbed, averaged, row)
        heads, width = (spec.heads, spec.v_dim), spec.heads * spec.v_dim
        values = program.buffer("values", width)
        self.kv_b.emit(program, self.kv_b.value, averaged, values, spec.kv_rank, spec.v_dim)
        if spec.gate:
            gates = program.project(self.gate, source, "gates")
            program.gate(gates, values, heads, "SIGMOID", per_head=spec.gate == "head")
        return [Branch(values, width, self.o)]

    def _emit_queries(self, program: ProgramBuilder, source: int) -> int:
        if not self.spec.q_rank:
            return program.project(self.q, source, "queries")
        low = program.project(self.q_a, source, "low-rank queries")
        self.q_a_norm.emit(program, low, low)
        return program.project(self.q_b, low, "queries")

    def _queries(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The indexer's input [T, q_rank], the queries [T, H, N + R], their gates [T, H, V]."""
        spec, width = self.spec, self.spec.nope_dim + self.spec.rope_dim
        if not spec.q_rank:
            return x_TD, self.q.run(x_TD).view(-1, spec.heads, width), None
        raw_TQ = self.q_a.run(x_TD)
        low_TQ = self.q_a_norm.run(raw_TQ)
        if not spec.gate_from_q:
            return low_TQ, self.q_b.run(low_TQ).view(-1, spec.heads, width), None
        both = self.q_b.run(torch.cat((low_TQ, raw_TQ), -1))
        q_THC, gate_THV = both.view(-1, spec.heads, width + spec.v_dim).split_with_sizes(
            (width, spec.v_dim), -1
        )
        return low_TQ, q_THC.contiguous(), gate_THV

    def _gated(self, out_TV: Tensor, x_TD: Tensor) -> Tensor:
        """The heads' values times the sigmoid of a gate for each channel or head: [T, H * V]."""
        opened = self._context.kernels.sigmoid(self.gate.run(x_TD))
        heads = out_TV.view(-1, self.spec.heads, self.spec.v_dim)
        return (heads * opened.view(heads.shape[0], self.spec.heads, -1)).flatten(1)


class UpProjection(Module):
    """kv_b [H * (N + V), L], split into its key and value halves."""

    site = -1  # of keys among the layers that adapters may change

    def __init__(
        self, spec: LatentAttention, place: Placement | None, heads: int, context: LayerContext
    ) -> None:
        """``spec`` has the heads of ``place``, of ``heads`` in all."""
        self.spec, self._kernels = spec, context.kernels
        rows, self._rows = heads * (spec.nope_dim + spec.v_dim), place.rows if place else ()
        self.weight = Param((rows, spec.kv_rank), shard=Shard(0))
        if place is not None:
            self.weight.cut(Cut(0, rows, place.rows))

    def finish(self) -> None:
        kernels = self._kernels
        weight = self.weight.borrow() if kernels.copies_weights else self.weight.take()
        halves = weight.view(self.spec.heads, -1, self.spec.kv_rank).split_with_sizes(
            (self.spec.nope_dim, self.spec.v_dim), 1
        )
        self.key = kernels.pack_head_linear(halves[0].transpose(1, 2).contiguous())
        self.value = kernels.pack_head_linear(halves[1].contiguous())

    def adapt(self, site: int, step: StepAdapters) -> None:
        """Let adapters change both halves, which are loaded; the site of values is the next."""
        self.site, self._step = site, step

    @property
    def packed_sites(self) -> dict[int, int]:
        """The sites by the ``id`` of what is packed."""
        return {id(self.key): self.site, id(self.value): self.site + 1}

    def split(self, part: LoraPart) -> tuple[list[LoraPart], list[LoraPart]]:
        """What an adapter's part of the whole matrix is for keys and for values of each head: a
        query is multiplied by the transposed key half, so B's and A's places are changed there."""
        spec = self.spec
        rows, whole = spec.nope_dim + spec.v_dim, self.weight.whole_shape[0]
        b_OR = part.b_OR.new_zeros(whole, part.rank)
        b_OR[part.first : part.first + len(part.b_OR)] = part.b_OR
        b_OR = torch.cat([b_OR[slice(*one)] for one in self._rows or ((0, whole),)])
        a_LR, keys, values = part.a_RI.T.contiguous(), [], []
        for head, b_CR in enumerate(b_OR.view(spec.heads, rows, part.rank)):
            key_NR, value_VR = b_CR.split_with_sizes((spec.nope_dim, spec.v_dim))
            keys.append(LoraPart(key_NR.T.contiguous(), a_LR, part.scale, block=head))
            values.append(LoraPart(part.a_RI, value_VR.contiguous(), part.scale, block=head))
        return keys, values

    def absorb(self, q_THN: Tensor) -> Tensor:
        """Queries in latent space: [T, H, L]."""
        return self._run(self.key, q_THN, 0)

    def expand(self, out_THL: Tensor) -> Tensor:
        """Values of averaged latents: [T, H * V]."""
        return self._run(self.value, out_THL, 1).flatten(1)

    def _run(self, half: PackedHeads, x_THI: Tensor, offset: int) -> Tensor:
        y_THO = half.run(x_THI)
        if self.site >= 0 and self._step.rows is not None:
            self._step.rows.add_heads_(self.site + offset, x_THI, y_THO)
        return y_THO

    def emit(
        self, program: ProgramBuilder, half: object, source: int, target: int, x_head: int,
        y_head: int,
    ) -> None:  # fmt: skip
        """One half as an operation; ``x_head`` and ``y_head``: numbers from head to head."""
        if not isinstance(half, HeadLinear):
            raise Unsupported(f"kv_b as {type(half).__name__}")
        program.keep.append(half)
        site = program.site_of(half)
        program.ops.heads(
            x=source, y=target, w=half.handle, x_head=x_head, y_head=y_head, site=site
        )
