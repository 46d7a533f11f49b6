"""Scores that gain by what a token's values say, and the tokens that are read for it
(``spec.AttentionExtras.dynamic_mask_topk``, arXiv:2508.02124).

Legend: Q query tokens of a piece, N tokens of its sequence, H query heads, K KV heads, V channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import QueryChunk
from radixlm.layers.module import Module
from radixlm.quant.param import Param


class DynamicMask(Module):
    """A number a KV head of every token's values."""

    def __init__(self, spec: Attention, keeps: int, context: LayerContext) -> None:
        self._spec, self._keeps = spec, keeps
        self.step = context.plain_linear(spec.kv_heads * spec.v_dim, spec.kv_heads, spec.qkv_bias)
        self.rate = Param((spec.kv_heads,), "float32")

    def finish(self) -> None:
        self._rate_K = self.rate.take()

    def bias(self, piece: QueryChunk) -> Tensor:
        """What the scores gain: float32 [H, Q, N]."""
        gains_KN = self._gains(piece)
        heads = self._spec.heads // self._spec.kv_heads
        of_heads = gains_KN.repeat_interleave(heads, 0)
        return of_heads[:, None].expand(-1, len(piece.place_Q), -1).contiguous()

    def choose(self, piece: QueryChunk) -> Tensor:
        """bool [H, Q, N]: the tokens with the largest gains, all where they are few."""
        seen_QN = piece.seen_QN
        if piece.k_NKC.shape[0] <= self._keeps:
            return seen_QN
        gains = self._gains(piece)[:, None].masked_fill(~seen_QN, -torch.inf)
        # stable: of equal gains the earlier token, however a prompt is cut
        best = torch.sort(gains, dim=-1, descending=True, stable=True)[1][..., : self._keeps]
        chosen = torch.zeros_like(gains, dtype=torch.bool).scatter_(-1, best, True) & seen_QN
        return chosen.repeat_interleave(self._spec.heads // self._spec.kv_heads, 0)

    def _gains(self, piece: QueryChunk) -> Tensor:
        """float32 [K, N]."""
        steps_NK = self.step.run(piece.v_NKV.flatten(1).contiguous()).float()
        return torch.exp(self._rate_K * F.softplus(steps_NK)).T
