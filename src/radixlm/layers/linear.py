"""Linear layers: the scheme decides how weights are stored, the kernels how they run."""

from collections.abc import Callable

from torch import Tensor

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.layers.module import Module
from radixlm.quant.param import Param, Shard
from radixlm.quant.scheme import Scheme


class Linear(Module):
    """y = x W^T + b. ``run`` is bound to the packed weight's by ``finish``."""

    run: Callable[[Tensor], Tensor]
    packed: PackedLinear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: Scheme,
        kernels: Kernels,
        shard: Shard | None = None,
        gate_act: str = "",
    ) -> None:
        """With ``gate_act``, the rows are [gate; up] and ``run`` gives act(gate) * up."""
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self._kernels, self._gate_act = kernels, gate_act
        self._params = scheme.params(out_features, in_features, bias, shard)

    def own_params(self) -> dict[str, Param]:
        return self._params

    def finish(self) -> None:
        self.packed = self.scheme.pack(self._kernels, self._params, self._gate_act)
        self.run = self.packed.run
