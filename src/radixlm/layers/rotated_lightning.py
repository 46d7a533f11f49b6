"""Lightning attention with normalized and rotated queries and keys (Ling 2.5).

Legend: T packed tokens, D model channels, H heads, C channels of a head; further letters as in
``layers/state``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Norm, RotatedLightning
from radixlm.layers.context import LayerContext
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.layers.state import GatedNorm, StateLayer
from radixlm.quant.param import Shard
from radixlm.step.batch import ForwardBatch


class RotatedLightningLayer(StateLayer):
    """qkv -> norms -> rotation -> linear attention with fixed decays -> norm -> gate -> out."""

    spec: RotatedLightning

    def __init__(
        self, spec: RotatedLightning, dim: int, context: LayerContext, row: int, rope: int
    ) -> None:
        """``rope`` indexes the model's RopeTables; -1: no rotation."""
        super().__init__(spec, dim, context, row)
        width, kernels = spec.heads * spec.head_dim, context.kernels
        self._rope, self._angles = rope, list[Angles]()
        self.qkv = context.linear(dim, 3 * width, spec.qkv_bias, Shard(0, (width,) * 3))
        self.gate = context.linear(dim, width)
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = self._head_norm(spec.qk_norm), self._head_norm(spec.qk_norm)
        self.norm = GatedNorm(spec.norm, width, spec.norm_groups, "sigmoid", True, kernels)
        self.out = context.linear(width, dim, spec.o_bias)
        self._decays = torch.tensor(spec.decays, device=context.device)

    def _head_norm(self, norm: Norm) -> NormLayer:
        return self._norm(norm, self.spec.head_dim)

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        self._angles = [angles[self._rope]] if self._rope >= 0 else []
        return super().run(x_TD, batch, angles)

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        spec, qkv = self.spec, self.qkv.run(x_TD).float()
        if spec.act:
            qkv = self._context.kernels.activate(qkv, spec.act)
        q_THC, k_THC, v_THC = qkv.view(len(qkv), 3, spec.heads, spec.head_dim).unbind(1)
        if spec.qk_norm is not None:
            q_THC, k_THC = self._normed(self.q_norm, q_THC), self._normed(self.k_norm, k_THC)
        for cos_sin in self._angles:
            self._context.kernels.rope(q_THC, cos_sin, False)
            self._context.kernels.rope(k_THC, cos_sin, False)
        return [q_THC * spec.head_dim**-0.5, k_THC, v_THC, self.gate.run(x_TD)]

    def _normed(self, norm: NormLayer, x_THC: Tensor) -> Tensor:
        return norm.run(x_THC.reshape(-1, self.spec.head_dim)).view(x_THC.shape)

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v = inputs[:3]
        decays = self._decays.expand(*q.shape[:3])
        y, state = self._context.kernels.decayed_attention(v, decays, k, q, states[0])
        return y.flatten(2), [state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(self.norm.run(out, inputs[3]))
