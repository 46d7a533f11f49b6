"""The head of a model that returns embeddings or scores.

Legend: R pooled rows, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Dense, Norm, Pool
from radixlm.kernels.ops.activation import sigmoid, silu
from radixlm.layers.context import LayerContext
from radixlm.layers.linear import Linear
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer

_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": silu,
    "selu": F.selu,
    "sigmoid": sigmoid,
}


def head_layers(steps: Sequence[Dense | Norm], dim: int, context: LayerContext) -> list[Module]:
    """The layers of a head, in the order of its record; never quantized. ``dim``: their input."""
    layers: list[Module] = []
    for step in steps:
        if isinstance(step, Norm):
            layers.append(NormLayer(step, (dim,), context.kernels, context.device))
        else:
            layers.append(context.plain_linear(step.inputs, step.outputs, step.bias))
            dim = step.outputs
    return layers


class PooledHead:
    """Pooled rows in, vectors or scores out; over layers that the loader has filled."""

    def __init__(self, pool: Pool, layers: Sequence[Module], gate: Sequence[Module]) -> None:
        self.pool = pool
        self._head = list(zip(pool.head, layers, strict=True))
        self._gate = list(zip(pool.gate, gate, strict=True))

    def run(self, x_RI: Tensor, is_raw: bool = False) -> Tensor:
        """float32 [R, O]. ``is_raw``: the logits of probabilities, vectors of any length."""
        out = _chain(self._head, x_RI)
        after = self.pool.after
        if is_raw and after == "second":
            return out[:, 1:2] - out[:, 0:1]
        match "" if is_raw and after in ("unit", "sigmoid", "softmax") else after:
            case "unit":
                return F.normalize(out, dim=-1)
            case "sigmoid":
                return sigmoid(out)
            case "softmax":
                return torch.softmax(out, -1)
            case "second":
                return torch.softmax(out, -1)[:, 1:2]
            case "gated":
                return (out[:, 0::2] * _chain(self._gate, x_RI)).sum(-1, keepdim=True)
        return out


def _chain(steps: Sequence[tuple[Dense | Norm, Module]], x_RI: Tensor) -> Tensor:
    x = x_RI.float()
    for record, layer in steps:
        if isinstance(record, Dense):
            assert isinstance(layer, Linear)
            x = _ACTS[record.act](layer.run(x).float())
        else:
            assert isinstance(layer, NormLayer)
            x = layer.run(x)
    return x
