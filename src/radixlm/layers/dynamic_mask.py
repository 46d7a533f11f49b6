"""Dynamic masks: a bias of the scores made of each token's values, and the tokens that it selects
(``spec.AttentionExtras.dynamic_mask_topk``, arXiv:2508.02124).

Legend: Q query tokens of a chunk, N tokens of its sequence, H query heads, K KV heads, V channels.
"""

import torch
from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.kernels.ops.activation import softplus
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import QueryChunk
from radixlm.layers.module import Module
from radixlm.quant.param import Param


class DynamicMask(Module):
    """A number for each KV head, projected from every token's values."""

    def __init__(self, spec: Attention, top_k: int, context: LayerContext) -> None:
        self._spec, self._top_k = spec, top_k
        self.step = context.plain_linear(spec.kv_heads * spec.v_dim, spec.kv_heads, spec.qkv_bias)
        self.rate = Param((spec.kv_heads,), "float32")

    def finish(self) -> None:
        self._rate_K = self.rate.take()

    def bias(self, chunk: QueryChunk) -> Tensor:
        """The bias of the scores: float32 [H, Q, N]."""
        gains_KN = self._biases(chunk)
        heads = self._spec.heads // self._spec.kv_heads
        of_heads = gains_KN.repeat_interleave(heads, 0)
        return of_heads[:, None].expand(-1, len(chunk.positions_Q), -1).contiguous()

    def choose(self, chunk: QueryChunk) -> Tensor:
        """bool [H, Q, N]: the tokens with the largest biases; all of a short sequence."""
        causal_QN = chunk.causal_QN
        if chunk.k_NKC.shape[0] <= self._top_k:
            return causal_QN
        gains = self._biases(chunk)[:, None].masked_fill(~causal_QN, -torch.inf)
        # stable: of equal gains the earlier token, however a prompt is cut
        best = torch.sort(gains, dim=-1, descending=True, stable=True)[1][..., : self._top_k]
        chosen = torch.zeros_like(gains, dtype=torch.bool).scatter_(-1, best, True) & causal_QN
        return chosen.repeat_interleave(self._spec.heads // self._spec.kv_heads, 0)

    def _biases(self, chunk: QueryChunk) -> Tensor:
        """float32 [K, N]."""
        steps_NK = self.step.run(chunk.v_NKV.flatten(1).contiguous()).float()
        return torch.exp(self._rate_K * softplus(steps_NK)).T
