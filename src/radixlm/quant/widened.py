"""Checkpoints whose own source says, weight by weight, what layers can keep: bitsandbytes, HQQ and
torchao."""

from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.arch.quant_methods import METHODS
from radixlm.base.record import Record
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import FORMATS
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.quant.fp8 import PrequantizedFp8Scheme
from radixlm.quant.param import Param
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.quant.scheme import Scheme


class WidenedQuant(Record):
    """Integers stay as they are stored, numbers that no kernel multiplies are dequantized."""

    method: str
    source: ClassVar[str] = ""

    def matches_flag(self, flag: str) -> bool:
        return flag in METHODS[self.method].flags

    def scheme(self) -> Scheme:
        return PrequantizedScheme()


class BitsAndBytesQuant(WidenedQuant):
    """nf4, fp4 or LLM.int8: the tensors say which."""

    source: ClassVar[str] = "radixlm.weights.bitsandbytes_source:BitsAndBytesSource"


class HqqQuant(WidenedQuant):
    """1 to 8 bits, by layer: the tensors say how many."""

    source: ClassVar[str] = "radixlm.weights.hqq_source:HqqSource"


class TorchAoQuant(WidenedQuant):
    """Classes of tensors, which the files' metadata name."""

    source: ClassVar[str] = "radixlm.weights.torchao_source:TorchAoSource"

    def scheme(self) -> Scheme:
        return MixedScheme(FORMATS[0])


class W4AFp8Quant(WidenedQuant):
    """Experts in 4 bits, all else in 8 bit floats."""

    source: ClassVar[str] = "radixlm.weights.low_bit_source:W4AFp8Source"

    def scheme(self) -> Scheme:
        return MixedScheme(FORMATS[1])


class BitNetQuant(WidenedQuant):
    """Ternary weights. ``divides``: so does the scale of a weight. ``is_online``: the files hold
    floats."""

    divides: bool = True
    is_online: bool = False
    source: ClassVar[str] = "radixlm.weights.low_bit_source:BitNetSource"


def parse_w4afp8(config: Mapping[str, Any]) -> WidenedQuant:
    """Of DeepSeek's experts in 4 bits."""
    return W4AFp8Quant("w4afp8")


def parse_bitnet(config: Mapping[str, Any]) -> WidenedQuant:
    """Of Hugging Face."""
    divides = config.get("linear_class", "bitlinear") != "autobitlinear"
    return BitNetQuant("bitnet", divides, config.get("quantization_mode") == "online")


def parse_bitsandbytes(config: Mapping[str, Any]) -> WidenedQuant:
    """Of Hugging Face; layers that were left out are floats in the files."""
    return BitsAndBytesQuant("bitsandbytes")


def parse_hqq(config: Mapping[str, Any]) -> WidenedQuant:
    """Of Hugging Face."""
    return HqqQuant("hqq")


def parse_torchao(config: Mapping[str, Any]) -> WidenedQuant:
    """Of Hugging Face."""
    return TorchAoQuant("torchao")


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
