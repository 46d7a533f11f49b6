"""Checkpoints of compressed-tensors: 8 bit floats, integers (pack-quantized, int-quantized), 4 bit
floats, mixtures of them, and sparse weights."""

from collections.abc import Callable, Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.quant.checkpoint import StoredQuant, block_sizes
from radixlm.quant.fp4 import Fp4Quant, MixedQuant, SparseQuant
from radixlm.quant.fp8 import with_block
from radixlm.quant.integers import BITS, IntegerQuant, check_bits, group_sizes, unsupported

NAME = "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense")
_SPARSE = ("dense", "sparse-bitmask", "sparse-24-bitmask")
_FP8_STRATEGIES = {"tensor", "channel", "group", "block"}
_INTEGER_STRATEGIES = ("tensor", "channel", "group", "block")


def parse(config: Mapping[str, Any]) -> StoredQuant | None:
    """Read a ``quantization_config``; None for types of numbers that are not read, ConfigError for
    layouts that are not."""
    by_name = config.get("config_groups")
    values = by_name.values() if isinstance(by_name, dict) else ()
    groups = [group for group in values if isinstance(group, dict)]
    of_kind: dict[object, list[dict[str, Any]]] = {}
    for group in groups:
        if isinstance(weights := group.get("weights"), dict):
            of_kind.setdefault(_kind(weights), []).append(group)
    if config.get("transform_config"):
        raise ConfigError("quantization_config: transform_config (rotations) cannot be computed")
    parts: list[StoredQuant] = [SparseQuant(NAME)] if _is_sparse(config) else []
    if not of_kind.keys() <= _PARSERS.keys():
        return None
    for kind, parser in _PARSERS.items():
        if kind in of_kind:
            parts.append(parser(config, of_kind[kind]))
    return parts[0] if len(parts) == 1 and not _is_sparse(config) else _mixed(parts)


def _mixed(parts: list[StoredQuant]) -> StoredQuant | None:
    return MixedQuant(NAME, tuple(parts)) if parts else None


def _kind(weights: Mapping[str, Any]) -> object:
    """What a group's numbers are: (float, bits) or int."""
    kind = weights.get("type", "int")
    return kind if kind == "int" else (kind, weights.get("num_bits"))


def _is_sparse(config: Mapping[str, Any]) -> bool:
    sparsity = config.get("sparsity_config")
    layout = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    if layout not in _SPARSE:
        raise unsupported(f"sparse compressed-tensors in the format {layout!r}", "format", _SPARSE)
    return layout != "dense"


def _parse_fp4(config: Mapping[str, Any], groups: list[dict[str, Any]]) -> StoredQuant:
    return Fp4Quant(NAME)


def _parse_fp8(config: Mapping[str, Any], groups: list[dict[str, Any]]) -> StoredQuant:
    weights = [group["weights"] for group in groups]
    strategies = {str(w.get("strategy")) for w in weights}
    if not strategies <= _FP8_STRATEGIES:
        raise ConfigError(
            "quantization_config: 8 bit floats with scales by "
            f"{', '.join(sorted(strategies))} cannot be loaded; known: "
            + ", ".join(sorted(_FP8_STRATEGIES))
        )
    blocks = _block_structures(weights)
    blocks += [(1, w.get("group_size")) for w in weights if w.get("strategy") == "group"]
    return with_block(NAME, blocks[0] if blocks else None)


def _parse_integers(config: Mapping[str, Any], groups: list[dict[str, Any]]) -> StoredQuant:
    weights = [group["weights"] for group in groups]
    formats = {str(one.get("format")) for one in groups if one.get("format")}
    formats = formats or {str(config["format"])} if config.get("format") else formats
    for layout in sorted(formats - {*_FORMATS, "mixed-precision"}):
        raise unsupported(f"compressed-tensors in the format {layout!r}", "format", _FORMATS)
    sizes: set[int] = set()
    widths = {check_bits(NAME, one.get("num_bits", 8), BITS) for one in weights}
    for one in weights:
        strategy = str(one.get("strategy") or ("group" if one.get("group_size") else "channel"))
        if strategy not in _INTEGER_STRATEGIES:
            raise unsupported(
                f"integers with scales by {strategy}", "strategy", _INTEGER_STRATEGIES
            )
        if strategy == "group":
            sizes.update(group_sizes(NAME, one.get("group_size")))
    blocks = _block_structures(weights)
    rows, inputs = block_sizes(blocks[0]) if blocks else (1, 0)
    return IntegerQuant(
        NAME,
        "compressed",
        bits=widths.pop() if len(widths) == 1 else 0,
        groups=tuple(sorted(sizes | {inputs} - {0})),
        block_rows=rows,
        quantizes_inputs=any(isinstance(g.get("input_activations"), dict) for g in groups),
    )


def _block_structures(weights: list[dict[str, Any]]) -> list[object]:
    """The block size of each group with scales by blocks."""
    return [w.get("block_structure") for w in weights if w.get("strategy") == "block"]


# in the order of the sources, the innermost first
_PARSERS: Mapping[object, Callable[[Mapping[str, Any], list[dict[str, Any]]], StoredQuant]] = {
    ("float", 8): _parse_fp8,
    "int": _parse_integers,
    ("float", 4): _parse_fp4,
}
