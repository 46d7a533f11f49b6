"""The matrix memory of xLSTM (arXiv:2405.04517).

Legend: B sequences of a segment, L tokens of each, H heads, K key channels, V value channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import MatrixLstm
from radixlm.layers.context import LayerContext
from radixlm.layers.norm import NormLayer
from radixlm.layers.state import StateLayer, split_last
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import ForwardBatch


class MatrixLstmLayer(StateLayer):
    """q, k, v, gates -> decayed sums of k v^T -> divided by the sum of k -> head norm -> out."""

    spec: MatrixLstm

    def __init__(self, spec: MatrixLstm, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        keys, values = spec.heads * spec.k_dim, spec.heads * spec.v_dim
        self._rows = (keys, keys, values, values)
        self.qkvo = context.linear(dim, sum(self._rows), shard=Shard(0, self._rows))
        gates = Shard(0, (spec.heads,) * 2)
        self.gates = context.plain_linear(dim, 2 * spec.heads, True, gates)
        self.norm_weight = Param((values,), "float32")
        self.norm = NormLayer(spec.norm, (spec.v_dim,), context.kernels, context.device)
        self.out = context.linear(values, dim)

    def finish(self) -> None:
        self._weight_C = self.norm_weight.take()

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        q, k, v, opened = self.qkvo.run(x_TD).split_with_sizes(self._rows, -1)
        gates = self.gates.run(x_TD).float()
        if self.spec.gate_cap:
            gates = torch.tanh(gates / self.spec.gate_cap) * self.spec.gate_cap
        input_gate, forget_gate = gates.chunk(2, -1)
        return [q, k, v, input_gate, forget_gate, opened]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec, (memory, max_BH) = self.spec, states
        q, k, v = (split_last(t, spec.heads, -1) for t in inputs[:3])
        input_gate, decays = inputs[3], F.logsigmoid(inputs[4])
        # the sum of the keys is one more value channel
        wide = F.pad(v, (0, 1), value=1.0) * torch.exp(input_gate)[..., None]
        q = q * spec.k_dim**-0.5
        y, memory = self._context.kernels.decayed_attention(wide, decays, k, q, memory)
        max_BLH, max_BH = self._context.kernels.decayed_max(decays, input_gate, max_BH)
        size = y[..., -1].abs().clamp(min=1.0) + spec.eps * torch.exp(max_BLH)
        return y[..., :-1] / size[..., None], [memory, max_BH]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        normed = self.norm.run(out.reshape(-1, self.spec.v_dim)).view(out.shape[0], -1)
        opened = self._context.kernels.sigmoid(inputs[5].float())
        return self.out.run((opened * normed * self._weight_C).to(out.dtype))
