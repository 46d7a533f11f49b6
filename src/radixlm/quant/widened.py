"""Checkpoints whose own source says, weight by weight, what layers can keep: bitsandbytes."""

from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.arch.quant_methods import METHODS
from radixlm.base.record import Record
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


def parse_bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytesQuant:
    """Of Hugging Face; layers that were left out are floats in the files."""
    return BitsAndBytesQuant("bitsandbytes")
