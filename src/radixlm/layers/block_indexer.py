"""The indexer of block-sparse attention: which blocks each query reads (``spec.BlockIndexer``).

Legend: T tokens, D model channels, G index heads, I channels of one, K KV heads, C channels of K;
of a query chunk (``layers/gathered``): Q queries, N tokens of its sequence, B blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import Attention, BlockIndexer
from radixlm.kernels.ops.rope import rope_angles
from radixlm.kernels.products import head_products
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import Choose, IndexChunk
from radixlm.layers.indexer import index_scores
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles, axes_of
from radixlm.step.batch import ForwardBatch


class BlockIndexerLayer(Module):
    """Queries and keys of the indexer, and the blocks that they choose."""

    def __init__(
        self, attention: Attention, index: BlockIndexer, dim: int, context: LayerContext
    ) -> None:
        self._attention, self._index, self._rotate = attention, index, context.kernels.rope
        kernels, device = context.kernels, context.device
        self.q = context.plain_linear(dim, index.heads * index.dim)
        self.k = context.plain_linear(dim, index.dim)
        self.q_norm = NormLayer(index.norm, (index.dim,), kernels, device)
        self.k_norm = NormLayer(index.norm, (index.dim,), kernels, device)

    def append_key(self, k_TKC: Tensor, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        """K with a part of the indexer's key appended to each head: [T, K, k_row]."""
        heads, row = self._attention.kv_heads, self._attention.k_row
        key_TI = self._key(x_TD, cos_sin)
        parts = (row - self._attention.head_dim) * heads
        key_TI = F.pad(key_TI, (0, parts - self._index.dim))
        return torch.cat((k_TKC, key_TI.view(-1, heads, parts // heads)), -1)

    def _key(self, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        """The indexer's key of each token: [T, I]."""
        return self._with_rope(self.k_norm.run(self.k.run(x_TD))[:, None], cos_sin)[:, 0]

    def _queries(self, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        """[T, G, I]."""
        index = self._index
        rows = self.q_norm.run(self.q.run(x_TD).view(-1, index.dim))
        return self._with_rope(rows.view(-1, index.heads, index.dim), cos_sin)

    def chooser(self, x_TD: Tensor, cos_sin: Angles | None, batch: ForwardBatch) -> Choose:
        """The keys that this step's tokens read: bool [G, Q, N] of a query chunk."""
        index = self._index
        q_TGI = self._queries(x_TD, cos_sin)

        def choose(chunk: IndexChunk) -> Tensor:
            key_NI = chunk.index_NKR.flatten(1)[:, : index.dim]
            scores_GQN = head_products(q_TGI[chunk.rows].transpose(0, 1).float(), key_NI[:, None])
            scores = scores_GQN.masked_fill(~chunk.causal_QN, -torch.inf)
            blocks = self._blocks(scores, chunk.positions_Q)
            return blocks.repeat_interleave(index.size, -1)[..., : key_NI.shape[0]]

        return choose

    def _blocks(self, scores_GQN: Tensor, positions_Q: Tensor) -> Tensor:
        """bool [G, Q, B]: the chosen blocks."""
        index = self._index
        short = -scores_GQN.shape[-1] % index.size
        padded = F.pad(scores_GQN, (0, short), value=-torch.inf)
        best_GQB = padded.view(*padded.shape[:-1], -1, index.size).amax(-1)
        count = best_GQB.shape[-1]
        behind_QB = (positions_Q // index.size)[:, None] - torch.arange(
            count, device=positions_Q.device
        )
        is_local = (behind_QB >= 0) & (behind_QB < index.local)
        best_GQB = best_GQB.masked_fill(is_local, torch.inf)
        # stable: of equal scores the earlier block, however a prompt is cut
        order = torch.sort(best_GQB, dim=-1, descending=True, stable=True)[1]
        chosen = torch.zeros_like(best_GQB, dtype=torch.bool)
        return chosen.scatter_(-1, order[..., : index.top], True)

    def _with_rope(self, x_TGI: Tensor, cos_sin: Angles | None) -> Tensor:
        if cos_sin is not None:
            assert self._attention.rope is not None
            self._rotate(x_TGI, cos_sin, self._attention.rope.interleaved)
        return x_TGI


class MeanBlockIndexer(BlockIndexerLayer):
    """An index of whole blocks by the mean of their keys; what follows the last whole block is
    always read."""

    def __init__(
        self, attention: Attention, index: BlockIndexer, dim: int, context: LayerContext
    ) -> None:
        super().__init__(attention, index, dim, context)
        self._inv_freq: Tensor | None = None
        self._axis_2R: Tensor | None = None
        if attention.rope is not None:
            frequencies, self._factor = inv_freq(attention.rope)
            self._inv_freq = torch.from_numpy(frequencies).to(context.device)
            if attention.rope.mrope_sections:
                self._axis_2R = axes_of(attention.rope).to(context.device).repeat(2)

    def _key(self, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        return self.k.run(x_TD)

    def chooser(self, x_TD: Tensor, cos_sin: Angles | None, batch: ForwardBatch) -> Choose:
        """The keys that this step's tokens read, for all heads: bool [Q, N] of a query chunk."""
        index = self._index
        q_TGI = self._queries(x_TD, cos_sin)

        def choose(chunk: IndexChunk) -> Tensor:
            key_NI = chunk.index_NKR.flatten(1)[:, : index.dim]
            complete_Q1 = (chunk.positions_Q[:, None] + 1) // index.size
            mrope = batch.mrope
            keys_BI = self._means(
                key_NI, mrope.of_sequence(chunk.sequence) if mrope is not None else None
            )
            ones_QG = torch.ones(q_TGI[chunk.rows].shape[:2], device=key_NI.device)
            scores = index_scores(q_TGI[chunk.rows], ones_QG, keys_BI.float())
            block_B = torch.arange(keys_BI.shape[0], device=key_NI.device)
            is_whole_QB = block_B < complete_Q1
            scores = scores.masked_fill(~is_whole_QB, -torch.inf)
            # stable: of equal scores the earlier block, however a prompt is cut
            order = torch.sort(scores, dim=-1, descending=True, stable=True)[1]
            best = torch.zeros_like(is_whole_QB).scatter_(1, order[:, : index.top], True)
            of_token = (best & is_whole_QB).repeat_interleave(index.size, 1)
            of_token = F.pad(of_token, (0, key_NI.shape[0] - of_token.shape[1]))
            places_N = torch.arange(key_NI.shape[0], device=key_NI.device)
            return of_token | (places_N >= complete_Q1 * index.size)

        return choose

    def _means(self, key_NI: Tensor, ids_3N: Tensor | None) -> Tensor:
        """The mean key of each whole block, normed and rotated as its first token: [B, I]."""
        size = self._index.size
        count = key_NI.shape[0] // size
        if not count:
            return key_NI[:0]
        blocks = key_NI[: count * size].view(count, size, key_NI.shape[1])
        means_BI = self.k_norm.run(blocks.float().mean(1).to(key_NI.dtype))
        if self._inv_freq is None:
            return means_BI
        starts_B = torch.arange(count, device=key_NI.device) * size
        return self._with_rope(means_BI[:, None], self._starts(starts_B, ids_3N))[:, 0]

    def _starts(self, starts_B: Tensor, ids_3N: Tensor | None) -> Angles:
        """By what the first tokens of blocks cos_sin: [B, 2R]."""
        assert self._inv_freq is not None
        if ids_3N is None or self._axis_2R is None:
            return rope_angles(starts_B, self._inv_freq, self._factor)
        ids_3B = ids_3N[:, starts_B]
        angles = rope_angles(ids_3B.flatten(), self._inv_freq, self._factor)
        columns = torch.arange(len(self._axis_2R), device=starts_B.device)
        return angles.view(3, len(starts_B), -1)[self._axis_2R, :, columns].T.contiguous()
