"""The index of an attention that reads some blocks of tokens (``spec.BlockIndex``).

Legend: T tokens, D model channels, G index heads, I channels of one, K KV heads, C channels of K;
of a piece (``layers/gathered``): Q queries, N tokens of its sequence, B blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Attention, BlockIndex
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered import Choose, Piece
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles


class BlockIndexLayer(Module):
    """Queries and keys of the index, and the choice that they make."""

    def __init__(
        self, attention: Attention, index: BlockIndex, dim: int, context: LayerContext
    ) -> None:
        self._attention, self._index, self._rotate = attention, index, context.kernels.rope
        kernels, device = context.kernels, context.device
        self.q = context.plain_linear(dim, index.heads * index.dim)
        self.k = context.plain_linear(dim, index.dim)
        self.q_norm = NormLayer(index.norm, (index.dim,), kernels, device)
        self.k_norm = NormLayer(index.norm, (index.dim,), kernels, device)

    def beside(self, k_TKC: Tensor, x_TD: Tensor, turn: Angles | None) -> Tensor:
        """K with a part of the index key behind each head: [T, K, k_row]."""
        heads, row = self._attention.kv_heads, self._attention.k_row
        key_TI = self._turned(self.k_norm.run(self.k.run(x_TD))[:, None], turn)[:, 0]
        parts = (row - self._attention.head_dim) * heads
        key_TI = F.pad(key_TI, (0, parts - self._index.dim))
        return torch.cat((k_TKC, key_TI.view(-1, heads, parts // heads)), -1)

    def chooser(self, x_TD: Tensor, turn: Angles | None) -> Choose:
        """The choice of this step's tokens: [H, Q, N] of a piece."""
        spec, index = self._attention, self._index
        q_TGI = self.q_norm.run(self.q.run(x_TD).view(-1, index.dim)).view(
            -1, index.heads, index.dim
        )
        q_TGI = self._turned(q_TGI, turn)

        def choose(piece: Piece) -> Tensor:
            key_NI = piece.k_NKC[..., spec.head_dim :].flatten(1)[:, : index.dim]
            scores = q_TGI[piece.rows].transpose(0, 1).float() @ key_NI.float().T  # [G, Q, N]
            scores = scores.masked_fill(~piece.seen_QN, -torch.inf)
            blocks = self._blocks(scores, piece.place_Q)
            of_token = blocks.repeat_interleave(index.size, -1)[..., : key_NI.shape[0]]
            return of_token.repeat_interleave(spec.heads // index.heads, 0)

        return choose

    def _blocks(self, scores_GQN: Tensor, place_Q: Tensor) -> Tensor:
        """bool [G, Q, B]: the chosen blocks."""
        index = self._index
        short = -scores_GQN.shape[-1] % index.size
        padded = F.pad(scores_GQN, (0, short), value=-torch.inf)
        best_GQB = padded.view(*padded.shape[:-1], -1, index.size).amax(-1)
        count = best_GQB.shape[-1]
        behind_QB = (place_Q // index.size)[:, None] - torch.arange(count, device=place_Q.device)
        is_local = (behind_QB >= 0) & (behind_QB < index.local)
        best_GQB = best_GQB.masked_fill(is_local, torch.inf)
        # stable: of equal scores the earlier block, however a prompt is cut
        order = torch.sort(best_GQB, dim=-1, descending=True, stable=True)[1]
        chosen = torch.zeros_like(best_GQB, dtype=torch.bool)
        return chosen.scatter_(-1, order[..., : index.top], True)

    def _turned(self, x_TGI: Tensor, turn: Angles | None) -> Tensor:
        if turn is not None:
            assert self._attention.rope is not None
            self._rotate(x_TGI, turn, self._attention.rope.interleaved)
        return x_TGI
