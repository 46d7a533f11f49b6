"""Feed-forward layers. Legend: T tokens, D model channels."""

from __future__ import annotations

from torch import Tensor

from radixlm.arch.spec import Mlp
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.quant.param import Shard


class MlpLayer(Module):
    """down(act(gate) * up), or down(act(up)); ``up`` holds gate's rows above up's."""

    def __init__(self, spec: Mlp, dim: int, context: LayerContext) -> None:
        self.spec = spec
        parts = (spec.inner, spec.inner) if spec.gated else (spec.inner,)
        gate_act = spec.act if spec.gated else ""
        self.up = context.linear(dim, sum(parts), spec.bias, Shard(0, parts), gate_act)
        self.down = context.linear(spec.inner, dim, spec.bias, Shard(1))
        self._activate = context.kernels.activate

    def run(self, x_TD: Tensor) -> Tensor:
        """The feed-forward branch: [T, D]."""
        h = self.up.run(x_TD)
        return self.down.run(h if self.spec.gated else self._activate(h, self.spec.act))
