"""Checkpoints in integers: AWQ, GPTQ, W8A8 and blocks of int8. compressed-tensors has its own file
(``quant/compressed_tensors.py``)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from radixlm.base.errors import ConfigError
from radixlm.quant.checkpoint import StoredQuant, block_sizes

GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
BITS = (2, 3, 4, 5, 6, 7, 8)
Layout = Literal["awq", "gemv", "gptq", "compressed"]
# version -> layout; None: one of the permuted ones (weights/permuted_source.py)
_AWQ_VERSIONS: Mapping[str, Layout | None] = {
    **dict.fromkeys(("gemm", "exllama", "ipex"), "awq"),
    "gemv": "gemv",
    "gemv_fast": None,
    "marlin": None,
}
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # -> what was subtracted from the stored zero points

_ROUND_PACKINGS = (
    *("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel"),
    *("auto_round:auto_awq", "auto_round:awq"),
)


class IntegerQuant(StoredQuant):
    """How integers are stored. ``bits``: 0 if it follows from the tensors' shapes; in the layout
    "compressed" it decides where several fit. ``groups``: numbers of inputs that may share a scale,
    beside whole rows. ``block_rows``: rows that share one. ``zero_shift``: added to a stored zero
    point. ``quantizes_inputs``: the checkpoint was made for activations in 8 bits."""

    layout: Layout
    bits: int = 0
    groups: tuple[int, ...] = ()
    block_rows: int = 1
    zero_shift: int = 0
    quantizes_inputs: bool = False
    source: ClassVar[str] = "radixlm.weights.integer_source:IntegerSource"

    def matches_flag(self, flag: str) -> bool:
        return super().matches_flag(flag) or (flag == "w8a8_int8" and self.quantizes_inputs)


class PermutedQuant(IntegerQuant):
    """Integers in the order of a GPU kernel."""

    source: ClassVar[str] = "radixlm.weights.permuted_source:PermutedSource"


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
    """Of AutoAWQ, all its layouts."""
    version = str(config.get("version", "gemm")).lower()
    if version not in _AWQ_VERSIONS:
        raise unsupported(f"awq in the layout {version!r}", "version", tuple(_AWQ_VERSIONS))
    bits = check_bits("awq", config.get("bits", config.get("w_bit", 4)), (4,))
    groups = group_sizes("awq", config.get("group_size", config.get("q_group_size", 128)))
    layout = _AWQ_VERSIONS[version]
    if layout is None:
        return PermutedQuant("awq", "awq", bits, groups)
    return IntegerQuant("awq", layout, bits, groups)


def parse_qoq(config: Mapping[str, Any]) -> IntegerQuant:
    """Of QServe: 4 bits with a scale each row, or with whole multiples of it by groups."""
    bits = check_bits("qoq", config.get("wbits", 4), (4,))
    groups = group_sizes("qoq", config.get("group_size", -1))
    return PermutedQuant("qoq", "awq", bits, groups, quantizes_inputs=True)


def parse_auto_round(config: Mapping[str, Any]) -> StoredQuant | None:
    """Of Intel's AutoRound: GPTQ or AWQ, with bits and groups that may differ by layer."""
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round").lower()
    if config.get("data_type", "int") != "int":
        return None
    own = isinstance(config.get("extra_config"), dict) and config["extra_config"]
    bits = check_bits("auto-round", config.get("bits", 4), BITS)
    groups = GROUP_SIZES if own else group_sizes("auto-round", config.get("group_size", 128))
    if packing not in _ROUND_PACKINGS and not packing.startswith(("autoround", "gptq")):
        raise unsupported(
            f"auto-round in the layout {packing!r:.60}", "packing_format", _ROUND_PACKINGS
        )
    if "awq" in packing:
        return IntegerQuant("auto-round", "awq", check_bits("awq", bits, (4,)), groups)
    shift = 1 if "auto_gptq" in packing else 0
    return IntegerQuant("auto-round", "gptq", 0 if own else bits, groups, zero_shift=shift)


def parse_gptq(config: Mapping[str, Any]) -> IntegerQuant:
    """Of GPTQ, versions 1 and 2, and Marlin's order of them."""
    layout = str(config.get("checkpoint_format") or "gptq").lower()
    if config.get("is_marlin_format") or config.get("quant_method") == "marlin":
        layout = "marlin"
    groups = group_sizes("gptq", config.get("group_size", 128))
    if layout == "marlin":
        bits = check_bits("gptq in the layout marlin", config.get("bits", 4), (4,))
        return PermutedQuant("gptq", "gptq", bits, groups)
    if layout not in _GPTQ_FORMATS:
        known = (*_GPTQ_FORMATS, "marlin")
        raise unsupported(f"gptq in the layout {layout!r}", "checkpoint_format", known)
    bits = check_bits("gptq", config.get("bits", 4), BITS)
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
