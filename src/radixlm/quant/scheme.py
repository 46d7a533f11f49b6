"""Scheme: how linear layers store their weights. A layer asks it for parameters and for the object
that runs them, and knows nothing else about quantization."""

from collections.abc import Mapping

from torch import Tensor

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import BLOCK, FORMATS, is_fp8
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.kernels.ops.quantized import FP4_GROUPS, GROUPS
from radixlm.quant.param import Param, Shard, Storage


class Scheme:
    """One way to store linear weights; this one: in the checkpoint's dtype, or in that of
    ``--dtype``. ``head_fmt`` is the format of the output head, and ``head_storage`` the dtype of
    one that is in none."""

    head_fmt = ""
    head_storage: Storage = "weight"
    storage: Storage = "weight"

    def fmt(self, in_features: int) -> str:
        """The kernels' name of the format of a weight with so many inputs ("": its own dtype)."""
        return ""

    def expert_fmt(self, weight_EOI: Tensor) -> str:
        """As ``fmt``, of stacked experts with these values."""
        return self.fmt(weight_EOI.shape[-1])

    def accepts_quantized(self, in_features: int) -> bool:
        """Whether a weight with so many inputs may stay quantized as the checkpoint has it."""
        return False

    def rows_together(self, in_features: int) -> int:
        """How many outputs share a scale: ranks divide a weight between such blocks only."""
        return BLOCK if self.fmt(in_features) == FORMATS[1] else 1

    def params(
        self, out_features: int, in_features: int, bias: bool, shard: Shard | None
    ) -> dict[str, Param]:
        """The tensors to load, by checkpoint suffix ("weight", "bias", "scales", ...)."""
        params = {"weight": Param((out_features, in_features), self.storage, shard)}
        if bias:
            bias_shard = shard if shard is not None and shard.dim == 0 else None
            params["bias"] = Param((out_features,), "float32", bias_shard)
        return params

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        """Take the filled parameters and return the object that runs them. With ``gate_act`` the
        rows are [gate; up] and it computes act(gate) * up."""
        bias = params["bias"].take() if "bias" in params else None
        param = params["weight"]
        weight = param.borrow() if kernels.copies_weights else param.take()
        fmt = self.fmt(weight.shape[1])
        if gate_act:
            return kernels.pack_gated(weight, bias, fmt, gate_act)
        return kernels.pack_linear(weight, bias, fmt)


class OnlineQuantScheme(Scheme):
    """Quantizes float weights while they load; the float copy lives only while its layer loads."""

    def __init__(self, fmt: str) -> None:
        self._fmt = fmt
        # Logits and token embeddings suffer most: at least 8 bit integers or 16 bit floats.
        self.head_fmt = "" if is_fp8(fmt) else "int8wo"

    def fmt(self, in_features: int) -> str:
        """The requested format, or the nearest finer one that fits the number of inputs."""
        by_row, by_block = FORMATS
        if self._fmt == by_block:
            return by_block if in_features % BLOCK == 0 else by_row
        kind, _, requested = self._fmt.partition("-")
        if not requested:
            return self._fmt
        sizes = FP4_GROUPS if kind == "fp4" else GROUPS
        fitting = (g for g in reversed(sizes) if g <= int(requested) and in_features % g == 0)
        group = next(fitting, None)
        if group is None:
            return "w8a8" if kind == "w4a8" else "int8wo"
        return f"{kind}-{group}"


class HeadScheme(Scheme):
    """One fixed format, for any number of inputs, or one dtype."""

    def __init__(self, fmt: str, storage: Storage) -> None:
        self.head_fmt, self.storage = fmt, storage

    def fmt(self, in_features: int) -> str:
        return self.head_fmt
