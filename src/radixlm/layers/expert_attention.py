"""Attention with q and o projections that are experts, of which a token chooses some
(arXiv:2210.05144); all experts share keys and values.

Legend: T tokens, D model channels, E experts, J chosen ones, K KV heads, C head channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.layers.attention import site_of
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


class ExpertAttentionLayer(Module):
    """Each chosen expert's queries attend as a group of heads, then pass its output matrix."""

    site: AttentionSite

    def __init__(
        self, spec: Attention, dim: int, context: LayerContext, rope: int, pool: tuple[int, int]
    ) -> None:
        """``rope`` indexes the model's RopeTables, ``pool`` is (group, row)."""
        assert spec.extras is not None
        self.spec, self._rope, self._pool = spec, rope, pool
        self._prepare, self._pack = context.kernels.prepare_qk, context.kernels.pack_linear
        width = spec.kv_heads * spec.head_dim
        self._top = spec.heads // spec.kv_heads
        self.router = context.plain_linear(dim, spec.extras.experts)
        self.kv = context.linear(dim, 2 * width, False, Shard(0, (width, width)))
        self.q_experts = Param((spec.extras.experts, width, dim))
        self.o_experts = Param((spec.extras.experts, dim, width))
        self.bias = Param((dim,), "float32")

    def finish(self) -> None:
        self.site = site_of(self.spec, self._pool, None)
        self._q, self._o = (
            [self._pack(weight_OI, None, "") for weight_OI in weights.take()]
            for weights in (self.q_experts, self.o_experts)
        )
        self._bias = self.bias.take()

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        spec, count = self.spec, x_TD.shape[0]
        best, ids_TJ = self.router.run(x_TD).float().topk(self._top, -1)
        weights_TJ = best.softmax(-1)
        q_TJW = _by_experts(x_TD[:, None].expand(-1, self._top, -1), ids_TJ, self._q)
        shape = (count, self._top, spec.kv_heads, spec.head_dim)
        q = q_TJW.view(shape).transpose(1, 2).reshape(count, spec.heads, spec.head_dim)
        k, v = (t.reshape(count, spec.kv_heads, -1) for t in self.kv.run(x_TD).chunk(2, -1))
        self._prepare(q, k, None, angles[self._rope] if self._rope >= 0 else None, False)
        out = batch.attn.run(q, k, v, self.site)
        out_TJW = out.view(count, spec.kv_heads, self._top, -1).transpose(1, 2).flatten(2)
        y_TJD = _by_experts(out_TJW, ids_TJ, self._o) * weights_TJ[..., None]
        return (y_TJD.sum(1) + self._bias).to(x_TD.dtype)


def _by_experts(x_TJI: Tensor, ids_TJ: Tensor, experts: Sequence[PackedLinear]) -> Tensor:
    """Each row by the matrix of its expert: [T, J, O]."""
    out = x_TJI.new_empty(*ids_TJ.shape, experts[0].out_features)
    for expert in torch.unique(ids_TJ).tolist():
        rows = (ids_TJ == expert).nonzero(as_tuple=True)
        out[rows] = experts[expert].run(x_TJI[rows])
    return out
