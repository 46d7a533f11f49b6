"""Mixture-of-experts layer. Legend: T tokens, D model channels, E experts, I inner channels."""

from __future__ import annotations

from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.context import LayerContext
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.module import Module
from radixlm.quant.param import Param, Shard


class MoeLayer(Module):
    """Router, experts, and the shared expert with its gate."""

    def __init__(self, spec: Moe, dim: int, context: LayerContext) -> None:
        self.spec = spec
        self._kernels: Kernels = context.kernels
        self._fmts = (context.scheme.fmt(dim), context.scheme.fmt(spec.inner))
        self.router = context.plain_linear(dim, spec.experts, spec.bias)
        self.up = Param((spec.experts, 2 * spec.inner, dim), shard=Shard(1, (spec.inner,) * 2))
        self.down = Param((spec.experts, dim, spec.inner), shard=Shard(2))
        if spec.bias:
            self.up_bias = Param((spec.experts, 2 * spec.inner), "float32", Shard(1))
            self.down_bias = Param((spec.experts, dim), "float32")
        if spec.correction:
            self.correction = Param((spec.experts,), "float32")
        if spec.shared is not None:
            self.shared = MlpLayer(spec.shared, dim, context)
        if spec.shared_gate:
            self.shared_gate = context.plain_linear(dim, 1)

    def finish(self) -> None:
        params = (self.up, self.down)
        copies = self._kernels.copies_weights
        weights = [param.borrow() if copies else param.take() for param in params]
        biases = (self.up_bias.take(), self.down_bias.take()) if self.spec.bias else (None, None)
        self.experts = self._kernels.pack_experts(*weights, *biases, self.spec.act, self._fmts)
        self.correction_E = self.correction.take() if self.spec.correction else None

    def run(self, x_TD: Tensor) -> Tensor:
        """The feed-forward branch: [T, D]."""
        logits_TE = self.router.run(x_TD)
        weights_TK, ids_TK = self._kernels.route(logits_TE, self.correction_E, self.spec)
        y_TD = self.experts.run(x_TD, weights_TK, ids_TK)
        if self.spec.shared is not None:
            shared_TD = self.shared.run(x_TD)
            if self.spec.shared_gate:
                shared_TD = shared_TD * self._kernels.sigmoid(self.shared_gate.run(x_TD))
            y_TD += shared_TD
        return y_TD
