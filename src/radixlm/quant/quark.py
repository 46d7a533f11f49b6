"""Checkpoints of AMD Quark: integers, 8 bit floats (e4m3) or 4 bit floats (MXFP4), by layer.

``global_quant_config`` and the values of ``layer_quant_config`` and ``layer_type_quant_config``
give a ``weight`` each: dtype, qscheme (per_tensor, per_channel, per_group), group_size.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from radixlm.base.errors import ConfigError
from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.fp4 import Fp4Quant, MixedQuant
from radixlm.quant.fp8 import Fp8Quant
from radixlm.quant.integers import group_sizes, unsupported

_INTEGERS = ("int4", "uint4", "int8", "uint8")
_FLOATS: Mapping[str, StoredQuant] = {
    "fp8_e4m3": Fp8Quant("quark"),
    "fp4": Fp4Quant("quark"),
    "mxfp4": Fp4Quant("quark"),
}


class QuarkQuant(StoredQuant):
    """Integers. ``is_signed``: two's complement. ``is_grouped``: matrices are stored transposed.
    ``is_reordered``: eight numbers of a word are in the order 0 2 4 6 1 3 5 7."""

    is_signed: bool = True
    is_grouped: bool = False
    is_reordered: bool = True
    source: ClassVar[str] = "radixlm.weights.quark_source:QuarkSource"


# of the sources, the innermost first: 4 bit floats are bytes, which are integers to the last
_ORDER = (Fp8Quant, Fp4Quant, QuarkQuant)


def parse_quark(config: Mapping[str, Any]) -> StoredQuant | None:
    """Read a ``quantization_config``; None if it quantizes no weights, ConfigError for numbers that
    are not read."""
    export = config.get("export")
    method = export.get("pack_method", "reorder") if isinstance(export, dict) else "reorder"
    parts: dict[str, StoredQuant] = {}
    for spec in _weights(config):
        dtype = str(spec.get("dtype")).removeprefix("Dtype.")
        if dtype in _FLOATS:
            parts[type(_FLOATS[dtype]).__name__] = _FLOATS[dtype]
            continue
        if dtype not in _INTEGERS:
            raise unsupported(f"quark in {dtype:.40}", "dtype", (*_INTEGERS, *_FLOATS))
        is_grouped = spec.get("qscheme") == "per_group"
        if is_grouped:
            group_sizes("quark", spec.get("group_size"))
        is_signed = not dtype.startswith("u")
        parts[dtype] = QuarkQuant("quark", is_signed, is_grouped, method == "reorder")
    if sum(isinstance(part, QuarkQuant) for part in parts.values()) > 1:
        raise ConfigError("quantization_config: quark with two types of integers cannot be loaded")
    found = sorted(parts.values(), key=lambda part: _ORDER.index(type(part)))
    if len(found) < 2:
        return found[0] if found else None
    return MixedQuant("quark", tuple(found))


def _weights(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """How each kind of layer stores its weight."""
    layers: list[object] = [config.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        more = config.get(key)
        layers += more.values() if isinstance(more, dict) else ()
    for layer in layers:
        weight = layer.get("weight") if isinstance(layer, dict) else None
        for one in weight if isinstance(weight, list) else [weight]:
            if isinstance(one, dict):
                yield one
