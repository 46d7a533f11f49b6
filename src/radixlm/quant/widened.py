"""Checkpoints whose own source says, weight by weight, what layers can keep: bitsandbytes, HQQ and
torchao."""

from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import FORMATS
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.fp8 import PrequantizedFp8Scheme
from radixlm.quant.param import Param
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.quant.scheme import Scheme


class BitsAndBytesQuant(StoredQuant):
    """nf4, fp4 or LLM.int8: the tensors say which."""

    source: ClassVar[str] = "radixlm.weights.bitsandbytes_source:BitsAndBytesSource"


class HqqQuant(StoredQuant):
    """1 to 8 bits, by layer: the tensors say how many."""

    source: ClassVar[str] = "radixlm.weights.hqq_source:HqqSource"


class TorchAoQuant(StoredQuant):
    """Classes of tensors, which the files' metadata name."""

    source: ClassVar[str] = "radixlm.weights.torchao_source:TorchAoSource"

    def scheme(self) -> Scheme:
        return MixedScheme(FORMATS[0])


class W4AFp8Quant(StoredQuant):
    """Experts in 4 bits, all else in 8 bit floats."""

    source: ClassVar[str] = "radixlm.weights.low_bit_source:W4AFp8Source"

    def scheme(self) -> Scheme:
        return MixedScheme(FORMATS[1])


class BitNetQuant(StoredQuant):
    """Ternary weights. ``divides``: so does the scale of a weight. ``is_online``: the files hold
    floats."""

    divides: bool = True
    is_online: bool = False
    source: ClassVar[str] = "radixlm.weights.low_bit_source:BitNetSource"


def parse_bitnet(config: Mapping[str, Any]) -> StoredQuant:
    """Of Hugging Face."""
    divides = config.get("linear_class", "bitlinear") != "autobitlinear"
    return BitNetQuant("bitnet", divides, config.get("quantization_mode") == "online")


class MixedScheme(PrequantizedScheme):
    """Integers and 8 bit floats of one checkpoint, each as it is stored; experts in floats stay
    floats."""

    def __init__(self, fmt: str) -> None:
        """``fmt``: of kernels/ops/fp8.py."""
        self._floats = PrequantizedFp8Scheme(fmt)

    def rows_together(self, in_features: int) -> int:
        return self._floats.rows_together(in_features)

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        if params["weight"].quantized is not None:
            return super().pack(kernels, params, gate_act)
        return self._floats.pack(kernels, params, gate_act)
