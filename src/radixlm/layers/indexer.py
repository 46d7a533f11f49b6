"""The index of a latent attention: which tokens each query reads (``spec.Index``).

Legend: T tokens, D model channels, H index heads, I channels of one; of a chunk
(``layers/gathered``): Q queries, N tokens of its sequence, P pools of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Indexer, LatentAttention
from radixlm.kernels.products import LANES, place_shares, row_products
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import Choose, IndexChunk
from radixlm.layers.logn_scaling import LearnedLogScaling
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class IndexerLayer(Module):
    """Scores of all tokens for each query: a weighted sum over heads of relu(q . k)."""

    def __init__(
        self, spec: LatentAttention, index: Indexer, dim: int, context: LayerContext
    ) -> None:
        self._index, self._rope_dim, self._rotate = index, spec.rope_dim, context.kernels.rope
        if index.input_norm is not None:
            self.q_norm = NormLayer(index.input_norm, (dim,), context.kernels, context.device)
        read = spec.q_rank if index.input_norm is None else dim
        self.q = context.plain_linear(read, index.heads * index.dim)
        if index.log_scaling:
            self.log_scaling = LearnedLogScaling(
                *(Param((index.heads,), "float32") for _ in range(2))
            )
        self.k = context.plain_linear(dim, index.dim)
        self.k_norm = NormLayer(index.norm, (index.dim,), context.kernels, context.device)
        self.weights = context.plain_linear(dim, index.heads)
        self._scale = index.dim**-0.5 * index.heads**-0.5

    def keys(self, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        """The indexer's row of each token in the cache: [T, index.row]."""
        k_T1I = self.k_norm.run(self.k.run(x_TD))[:, None]
        self._apply_rope(k_T1I, cos_sin)
        return k_T1I[:, 0]

    def chooser(
        self, x_TD: Tensor, low_TQ: Tensor, cos_sin: Angles | None, batch: ForwardBatch
    ) -> Choose:
        """The keys that this step's tokens read; later layers may share the choice."""
        index = self._index
        read = low_TQ if index.input_norm is None else self.q_norm.run(x_TD)
        q_THI = self.q.run(read).view(-1, index.heads, index.dim)
        if index.log_scaling:
            q_THI = self.log_scaling.run(q_THI, batch.positions_T)
        self._apply_rope(q_THI, cos_sin)
        weights_TH = self.weights.run(x_TD).float() * self._scale
        batch.scratch.chosen_tokens = {}

        def choose(chunk: IndexChunk) -> Tensor:
            kept_NR = chunk.index_NKR[:, 0].float()
            chosen = self._choice(q_THI[chunk.rows], weights_TH[chunk.rows], kept_NR, chunk)
            batch.scratch.chosen_tokens[chunk.rows.start] = chosen
            return chosen

        return choose

    def _choice(
        self, q_QHI: Tensor, weights_QH: Tensor, kept_NR: Tensor, chunk: IndexChunk
    ) -> Tensor:
        """bool [Q, N], from the tokens' rows in the cache."""
        scores_QN = index_scores(q_QHI, weights_QH, kept_NR)
        return top_k_mask(scores_QN.masked_fill(~chunk.causal_QN, -torch.inf), self._index.top_k)

    def _apply_rope(self, x_THI: Tensor, cos_sin: Angles | None) -> None:
        if cos_sin is not None:
            first = self._index.dim - self._rope_dim if self._index.rope_on_tail else 0
            rotated = x_THI[..., first : first + self._rope_dim]
            self._rotate(rotated, cos_sin, self._index.interleaved)


class PooledIndexer(IndexerLayer):
    """Pools of so many neighbouring tokens are scored, and read as a whole, each by an average of
    its keys whose weights are learned; the tokens after the last whole pool are always read."""

    def __init__(
        self, spec: LatentAttention, index: Indexer, dim: int, context: LayerContext
    ) -> None:
        super().__init__(spec, index, dim, context)
        self.share = context.plain_linear(dim, index.dim)
        self.share_of_place = Param((index.pool, index.dim), "float32")

    def finish(self) -> None:
        self._share_of_place = self.share_of_place.take()

    def keys(self, x_TD: Tensor, cos_sin: Angles | None) -> Tensor:
        """Each token's key, and its weight in the average of its pool."""
        return torch.cat((super().keys(x_TD, cos_sin), self.share.run(x_TD)), -1)

    def _choice(
        self, q_QHI: Tensor, weights_QH: Tensor, kept_NR: Tensor, chunk: IndexChunk
    ) -> Tensor:
        size, dim, count = self._index.pool, self._index.dim, kept_NR.shape[0]
        num_pools = count // size
        pools_PSR = kept_NR[: num_pools * size].view(num_pools, size, 2 * dim)
        shares = place_shares(pools_PSR[..., dim:] + self._share_of_place)
        keys_PI = (shares * pools_PSR[..., :dim]).sum(1)
        whole_Q = (chunk.positions_Q + 1) // size  # pools that a query sees whole
        is_whole = torch.arange(num_pools, device=whole_Q.device) < whole_Q[:, None]
        scores_QP = index_scores(q_QHI, weights_QH, keys_PI).masked_fill(~is_whole, -torch.inf)
        chosen_QP = top_k_mask(scores_QP, self._index.top_k // size) & is_whole
        of_token = torch.arange(count, device=whole_Q.device)
        chosen = of_token >= whole_Q[:, None] * size
        chosen[:, : num_pools * size] |= chosen_QP.repeat_interleave(size, -1)
        return chosen


def index_scores(q_QHI: Tensor, weights_QH: Tensor, keys_NI: Tensor) -> Tensor:
    """A weighted sum over heads of relu(q . k): float32 [Q, N]."""
    heads, count = q_QHI.shape[1], keys_NI.shape[0]
    scores_QHN = row_products(q_QHI.float().flatten(0, 1), keys_NI).view(len(q_QHI), heads, count)
    if not scores_QHN.is_cpu:
        return (weights_QH[:, None] @ torch.relu(scores_QHN))[:, 0]
    scores_QHN = torch.relu(F.pad(scores_QHN, (0, -count % LANES)))
    total_QN = scores_QHN.new_zeros(scores_QHN.shape[0], scores_QHN.shape[2])
    for head in range(heads):  # one after the other, whatever the number of rows
        total_QN += scores_QHN[:, head] * weights_QH[:, head, None]
    return total_QN[:, :count]


def top_k_mask(scores_QN: Tensor, count: int) -> Tensor:
    """bool [Q, N]: the ``count`` best of each query."""
    # stable: of equal scores (many are zero) the earlier token, however a prompt is cut
    order = torch.sort(scores_QN, dim=-1, descending=True, stable=True)[1]
    chosen = torch.zeros_like(scores_QN, dtype=torch.bool)
    return chosen.scatter_(1, order[:, :count], True)


def shared_choice(batch: ForwardBatch) -> Choose:
    """The choice that an earlier layer has left in the step's scratch."""
    chosen: dict[int, Tensor] = batch.scratch.chosen_tokens

    def choose(chunk: IndexChunk) -> Tensor:
        return chosen[chunk.rows.start]

    return choose
