"""What every layer is built with."""

import torch

from radixlm.base.record import Record, field
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.linear import Linear
from radixlm.quant.param import Shard
from radixlm.quant.scheme import HeadScheme, Scheme, UnquantizedScheme


class LayerContext(Record):
    """``compute_dtype`` is the dtype of activations; ``scheme`` stores linear weights."""

    kernels: Kernels
    device: torch.device
    compute_dtype: torch.dtype
    scheme: Scheme = field(default_factory=UnquantizedScheme)

    def linear(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        shard: Shard | None = None,
        gate_act: str = "",
    ) -> Linear:
        """A linear layer in this context's scheme; ``gate_act`` as in ``Linear``."""
        return Linear(in_features, out_features, bias, self.scheme, self.kernels, shard, gate_act)

    def head_linear(self, in_features: int, out_features: int, bias: bool = False) -> Linear:
        """The output head, in the format that the scheme has for it."""
        scheme = HeadScheme(self.scheme.head_fmt)
        return Linear(in_features, out_features, bias, scheme, self.kernels)

    def plain_linear(self, in_features: int, out_features: int, bias: bool = False) -> Linear:
        """A linear layer that is never quantized (routers, gates, heads)."""
        return Linear(in_features, out_features, bias, UnquantizedScheme(), self.kernels)
