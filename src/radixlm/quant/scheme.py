"""Scheme: how a linear layer stores its weight. The layer asks it for parameters and for the
object that runs them; it knows nothing else about quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.quant.param import Param, Shard


class Scheme(Protocol):
    """One way to store linear weights. ``head_fmt`` is the format of the output head."""

    head_fmt: str

    def fmt(self, in_features: int) -> str:
        """The kernels' name of the format of a weight with so many inputs ("" = its dtype)."""
        ...

    def accepts_quantized(self, in_features: int) -> bool:
        """Whether a weight with so many inputs may keep the few bits of its checkpoint."""
        ...

    def params(
        self, out_features: int, in_features: int, bias: bool, shard: Shard | None
    ) -> dict[str, Param]:
        """The tensors to load, by checkpoint suffix ("weight", "bias", "scales", ...)."""
        ...

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        """Consume the filled parameters. With ``gate_act``, the rows are [gate; up] and the
        result runs act(gate) * up."""
        ...


class UnquantizedScheme:
    """The weight as it is in the checkpoint (or as ``--dtype`` says)."""

    head_fmt = ""

    def fmt(self, in_features: int) -> str:
        return ""

    def accepts_quantized(self, in_features: int) -> bool:
        return False

    def params(
        self, out_features: int, in_features: int, bias: bool, shard: Shard | None
    ) -> dict[str, Param]:
        params = {"weight": Param((out_features, in_features), shard=shard)}
        if bias:
            bias_shard = shard if shard is not None and shard.dim == 0 else None
            params["bias"] = Param((out_features,), "float32", bias_shard)
        return params

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        bias = params["bias"].take() if "bias" in params else None
        param = params["weight"]
        weight = param.borrow() if kernels.copies_weights else param.take()
        fmt = self.fmt(weight.shape[1])
        if gate_act:
            return kernels.pack_gated(weight, bias, fmt, gate_act)
        return kernels.pack_linear(weight, bias, fmt)


class HeadScheme(UnquantizedScheme):
    """One fixed format, whatever the number of inputs."""

    def __init__(self, fmt: str) -> None:
        self.head_fmt = fmt

    def fmt(self, in_features: int) -> str:
        return self.head_fmt
