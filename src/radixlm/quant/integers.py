"""Checkpoints in integers: AWQ, GPTQ, W8A8 and blocks of int8. compressed-tensors has its own file
(``quant/compressed_tensors.py``)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from radixlm.arch.quant_methods import METHODS
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.quant.checkpoint import block_sizes
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.quant.scheme import Scheme

GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
Layout = Literal["awq", "gptq", "compressed"]
_AWQ_VERSIONS = ("gemm", "exllama", "ipex")  # all with gemm's order of outputs
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # -> what was subtracted from the stored zero points


class IntegerQuant(Record):
    """How integers are stored. ``bits``: 0 if it follows from the tensors' shapes. ``groups``:
    numbers of inputs that may share a scale, beside whole rows. ``block_rows``: rows that share
    one. ``zero_shift``: added to a stored zero point. ``quantizes_inputs``: the checkpoint was made
    for activations in 8 bits."""

    method: str
    layout: Layout
    bits: int = 0
    groups: tuple[int, ...] = ()
    block_rows: int = 1
    zero_shift: int = 0
    quantizes_inputs: bool = False
    source: ClassVar[str] = "radixlm.weights.integer_source:IntegerSource"

    def matches_flag(self, flag: str) -> bool:
        if flag == "w8a8_int8" and self.quantizes_inputs:
            return True
        return flag in METHODS[self.method].flags

    def scheme(self) -> Scheme:
        return PrequantizedScheme()


def parse_w8a8(config: Mapping[str, Any]) -> IntegerQuant:
    """int8 rows with a scale each."""
    return IntegerQuant("w8a8_int8", "compressed", quantizes_inputs=True)


def parse_blockwise(config: Mapping[str, Any]) -> IntegerQuant:
    """int8 with a scale for each block."""
    rows, inputs = block_sizes(config.get("weight_block_size"))
    return IntegerQuant(
        "blockwise_int8", "compressed", 8, (inputs,), block_rows=rows, quantizes_inputs=True
    )


def parse_awq(config: Mapping[str, Any]) -> IntegerQuant:
    """Of AutoAWQ, in gemm's order of outputs."""
    version = str(config.get("version", "gemm")).lower()
    if version not in _AWQ_VERSIONS:
        raise unsupported(f"awq in the layout {version!r}", "version", _AWQ_VERSIONS)
    bits = check_bits("awq", config.get("bits", config.get("w_bit", 4)), (4,))
    group = config.get("group_size", config.get("q_group_size", 128))
    return IntegerQuant("awq", "awq", bits, group_sizes("awq", group))


def parse_gptq(config: Mapping[str, Any]) -> IntegerQuant:
    """Of GPTQ, versions 1 and 2."""
    layout = str(config.get("checkpoint_format") or "gptq").lower()
    if config.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _GPTQ_FORMATS:
        raise unsupported(
            f"gptq in the layout {layout!r}", "checkpoint_format", tuple(_GPTQ_FORMATS)
        )
    bits = check_bits("gptq", config.get("bits", 4), (4, 8))
    groups = group_sizes("gptq", config.get("group_size", 128))
    dynamic = config.get("dynamic")
    if isinstance(dynamic, dict) and dynamic:  # layers with bits and groups of their own
        bits, groups = 0, GROUP_SIZES
    return IntegerQuant("gptq", "gptq", bits, groups, zero_shift=_GPTQ_FORMATS[layout])


def check_bits(method: str, bits: object, known: tuple[int, ...]) -> int:
    """``bits``; ConfigError if it is not one of ``known``."""
    if isinstance(bits, int) and not isinstance(bits, bool) and bits in known:
        return bits
    raise unsupported(f"{method} of {bits!r:.40} bits", "bits", known)


def group_sizes(method: str, group: object) -> tuple[int, ...]:
    """The one size of groups, none for whole rows; ConfigError for other sizes."""
    if group == -1 and not isinstance(group, bool):
        return ()
    if isinstance(group, int) and group in GROUP_SIZES:
        return (group,)
    raise unsupported(f"{method} in groups of {group!r:.40}", "group_size", (-1, *GROUP_SIZES))


def unsupported(what: str, key: str, known: tuple[object, ...]) -> ConfigError:
    """The error for a layout that is not read, with the values of ``key`` that are."""
    names = ", ".join(str(one) for one in known)
    return ConfigError(f"quantization_config: {what} cannot be loaded; known {key}: {names}")
