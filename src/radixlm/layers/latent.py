"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in absorbed form: the cache holds
one latent of ``kv_rank + rope_dim`` numbers a token, and kv_b is folded into q and the output.

Legend: T tokens, D model channels, H heads, N no-rope channels, R rope channels, V value
channels, L the latent's rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Index, LatentAttention
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered import Choose, Piece, attend_gathered
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.temperature import temperatures
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


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
    ) -> None:
        self.spec, self._rope, self._pool, self._context = spec, rope, pool, context
        kernels, device = context.kernels, context.device
        query_rows = spec.heads * (spec.nope_dim + spec.rope_dim)
        if spec.q_rank:
            self.q_a = context.linear(dim, spec.q_rank, spec.bias)
            self.q_a_norm = NormLayer(spec.norm, (spec.q_rank,), kernels, device)
            self.q_b = context.linear(spec.q_rank, query_rows, shard=Shard(0))
        else:
            self.q = context.linear(dim, query_rows, shard=Shard(0))
        self.kv_a = context.linear(dim, spec.kv_rank + spec.rope_dim, spec.bias)
        self.kv_a_norm = NormLayer(spec.norm, (spec.kv_rank,), kernels, device)
        self.kv_b = UpProjection(spec, context)
        self.o = context.linear(spec.heads * spec.v_dim, dim, spec.bias, Shard(1))
        if spec.rope_norm is not None:
            self.k_rope_norm = NormLayer(spec.rope_norm, (spec.rope_dim,), kernels, device)
        if spec.sinks:
            self.sinks = Param((spec.heads,), "float32", Shard(0))
        if spec.gate:
            width = spec.heads * (spec.v_dim if spec.gate == "channel" else 1)
            self.gate = context.linear(dim, width, shard=Shard(0))
        if spec.index is not None and not spec.index.is_shared:
            self.index = IndexLayer(spec, spec.index, dim, context)

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
        turn = angles[self._rope] if self._rope >= 0 else None
        low_TQ = self.q_a_norm.run(self.q_a.run(x_TD)) if spec.q_rank else x_TD
        q = self.q_b.run(low_TQ) if spec.q_rank else self.q.run(x_TD)
        q_THC = q.view(-1, spec.heads, spec.nope_dim + spec.rope_dim)
        q_THN, q_THR = q_THC.split_with_sizes((spec.nope_dim, spec.rope_dim), -1)
        if turn is not None and spec.rope is not None:
            rotate(q_THR, turn, spec.rope.interleaved)
        latent_TL, k_TR = self.kv_a.run(x_TD).split_with_sizes((spec.kv_rank, spec.rope_dim), -1)
        if spec.rope_norm is not None:
            k_TR = self.k_rope_norm.run(k_TR.contiguous())
        if turn is not None and spec.rope is not None:
            rotate(k_TR[:, None], turn, spec.rope.interleaved)
        k_T1C = torch.cat((self.kv_a_norm.run(latent_TL.contiguous()), k_TR), -1)[:, None]
        q_THC = torch.cat((self.kv_b.absorb(q_THN), q_THR), -1)
        if spec.temperature is not None:
            grown_T = temperatures(spec.temperature, batch.positions_T)
            q_THC = q_THC * grown_T[:, None, None].to(q_THC.dtype)
        if spec.index is None:
            out_THL = batch.attn.run(q_THC, k_T1C, None, self.site)
        elif spec.index.is_shared:
            out_THL = attend_gathered(q_THC, k_T1C, None, self.site, batch, chosen_before(batch))
        else:
            k_T1C = torch.cat((k_T1C, self.index.keys(x_TD, turn)[:, None]), -1)
            choose = self.index.chooser(x_TD, low_TQ, turn, batch)
            out_THL = attend_gathered(q_THC, k_T1C, None, self.site, batch, choose)
        out_TV = self.kv_b.expand(out_THL.view(-1, spec.heads, spec.kv_rank))
        return self.o.run(self._gated(out_TV, x_TD) if spec.gate else out_TV)

    def _gated(self, out_TV: Tensor, x_TD: Tensor) -> Tensor:
        """The heads' values, each channel or each head as open as its gate: [T, H * V]."""
        opened = self._context.kernels.sigmoid(self.gate.run(x_TD))
        heads = out_TV.view(-1, self.spec.heads, self.spec.v_dim)
        return (heads * opened.view(heads.shape[0], self.spec.heads, -1)).flatten(1)


class IndexLayer(Module):
    """Scores of all tokens for each query: a weighted sum over heads of relu(q . k)."""

    def __init__(
        self, spec: LatentAttention, index: Index, dim: int, context: LayerContext
    ) -> None:
        self._index, self._turned, self._rotate = index, spec.rope_dim, context.kernels.rope
        self.q = context.plain_linear(spec.q_rank, index.heads * index.dim)
        self.k = context.plain_linear(dim, index.dim)
        self.k_norm = NormLayer(index.norm, (index.dim,), context.kernels, context.device)
        self.weights = context.plain_linear(dim, index.heads)
        self._scale = index.dim**-0.5 * index.heads**-0.5

    def keys(self, x_TD: Tensor, turn: Angles | None) -> Tensor:
        """What is kept of each token: [T, index.dim]."""
        k_T1I = self.k_norm.run(self.k.run(x_TD))[:, None]
        self._turn(k_T1I, turn)
        return k_T1I[:, 0]

    def chooser(
        self, x_TD: Tensor, low_TQ: Tensor, turn: Angles | None, batch: ForwardBatch
    ) -> Choose:
        """The choice of this step's tokens, which later layers may share."""
        index = self._index
        q_THI = self.q.run(low_TQ).view(-1, index.heads, index.dim)
        self._turn(q_THI, turn)
        weights_TH = self.weights.run(x_TD).float() * self._scale
        batch.chosen = {}

        def choose(piece: Piece) -> Tensor:
            keys_NI = piece.k_NKC[:, 0, -index.dim :].float()
            scores_QHN = torch.relu(q_THI[piece.rows].float() @ keys_NI.T)
            scores_QN = (weights_TH[piece.rows][:, None] @ scores_QHN)[:, 0]
            scores_QN = scores_QN.masked_fill(~piece.seen_QN, -torch.inf)
            # stable: of equal scores (many are zero) the earlier token, however a prompt is cut
            order = torch.sort(scores_QN, dim=-1, descending=True, stable=True)[1]
            best = order[:, : index.top_k]
            chosen = torch.zeros_like(scores_QN, dtype=torch.bool).scatter_(1, best, True)
            batch.chosen[piece.rows.start] = chosen
            return chosen

        return choose

    def _turn(self, x_THI: Tensor, turn: Angles | None) -> None:
        if turn is not None:
            first = self._index.dim - self._turned if self._index.turns_last else 0
            turned = x_THI[..., first : first + self._turned]
            self._rotate(turned, turn, self._index.interleaved)


def chosen_before(batch: ForwardBatch) -> Choose:
    """The choice that an earlier layer has left in the batch."""
    chosen: dict[int, Tensor] = batch.chosen

    def choose(piece: Piece) -> Tensor:
        return chosen[piece.rows.start]

    return choose


class UpProjection(Module):
    """kv_b [H * (N + V), L], split into its key and value halves."""

    def __init__(self, spec: LatentAttention, context: LayerContext) -> None:
        self.spec, self._pack = spec, context.kernels.pack_head_linear
        self.weight = Param(
            (spec.heads * (spec.nope_dim + spec.v_dim), spec.kv_rank), shard=Shard(0)
        )

    def finish(self) -> None:
        weight = self.weight.take()
        halves = weight.view(self.spec.heads, -1, self.spec.kv_rank).split_with_sizes(
            (self.spec.nope_dim, self.spec.v_dim), 1
        )
        self._key = self._pack(halves[0].transpose(1, 2).contiguous())
        self._value = self._pack(halves[1].contiguous())

    def absorb(self, q_THN: Tensor) -> Tensor:
        """Queries in the latent's space: [T, H, L]."""
        return self._key.run(q_THN)

    def expand(self, out_THL: Tensor) -> Tensor:
        """Values of averaged latents: [T, H * V]."""
        return self._value.run(out_THL).flatten(1)
