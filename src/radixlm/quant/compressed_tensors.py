"""Checkpoints of compressed-tensors: 8 bit floats, or integers (pack-quantized, int-quantized)."""

from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.quant.checkpoint import StoredQuant, block_sizes
from radixlm.quant.fp8 import with_block
from radixlm.quant.integers import IntegerQuant, check_bits, group_sizes, unsupported

NAME = "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense")
_FP8_STRATEGIES = {"tensor", "channel", "block"}
_INTEGER_STRATEGIES = ("tensor", "channel", "group", "block")


def parse(config: Mapping[str, Any]) -> StoredQuant | None:
    """Read a ``quantization_config``; None for types of numbers that are not read, ConfigError for
    layouts that are not."""
    by_name = config.get("config_groups")
    values = by_name.values() if isinstance(by_name, dict) else ()
    groups = [group for group in values if isinstance(group, dict)]
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    if not weights:
        return None
    if all((w.get("type"), w.get("num_bits")) == ("float", 8) for w in weights):
        return _parse_fp8(weights)
    if any(w.get("type", "int") != "int" for w in weights):
        return None
    return _parse_integers(config, groups, weights)


def _parse_fp8(weights: list[dict[str, Any]]) -> StoredQuant:
    strategies = {str(w.get("strategy")) for w in weights}
    if not strategies <= _FP8_STRATEGIES:
        raise ConfigError(
            "quantization_config: 8 bit floats with scales by "
            f"{', '.join(sorted(strategies))} cannot be loaded; known: tensor, channel, block"
        )
    blocks = _block_structures(weights)
    return with_block(NAME, blocks[0] if blocks else None)


def _parse_integers(
    config: Mapping[str, Any], groups: list[dict[str, Any]], weights: list[dict[str, Any]]
) -> StoredQuant:
    formats = {str(one.get("format")) for one in (config, *groups) if one.get("format")}
    for layout in sorted(formats - {*_FORMATS, "mixed-precision"}):
        raise unsupported(f"compressed-tensors in the format {layout!r}", "format", _FORMATS)
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ConfigError("quantization_config: sparse compressed-tensors cannot be loaded")
    if config.get("transform_config"):
        raise ConfigError("quantization_config: transform_config (rotations) cannot be computed")
    sizes: set[int] = set()
    for one in weights:
        check_bits(NAME, one.get("num_bits", 8), (4, 8))
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
        groups=tuple(sorted(sizes | {inputs} - {0})),
        block_rows=rows,
        quantizes_inputs=any(isinstance(g.get("input_activations"), dict) for g in groups),
    )


def _block_structures(weights: list[dict[str, Any]]) -> list[object]:
    """The block size of each group with scales by blocks."""
    return [w.get("block_structure") for w in weights if w.get("strategy") == "block"]
