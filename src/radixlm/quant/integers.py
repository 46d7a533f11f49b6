"""What ``quantization_config`` says of weights that are integers: AWQ, GPTQ, compressed-tensors
(pack-quantized, int-quantized), W8A8 and blocks of int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
W8A8, BLOCKWISE = "w8a8_int8", "blockwise_int8"
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
Layout = Literal["awq", "gptq", "compressed"]

# ``--quantization`` -> methods of checkpoints that it may be given for
ASKED = {
    "awq": (AWQ,),
    "awq_marlin": (AWQ,),
    "gptq": (GPTQ,),
    "gptq_marlin": (GPTQ,),
    "moe_wna16": (AWQ, GPTQ),
    "compressed-tensors": (COMPRESSED,),
    "blockwise_int8": (BLOCKWISE,),
}
_AWQ_VERSIONS = ("gemm", "exllama", "ipex")  # all with gemm's order of outputs
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # -> what was taken off the stored zero points
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense")
_STRATEGIES = ("tensor", "channel", "group", "block")


class IntegerQuant(Record):
    """How integers are stored. ``bits``: 0 where the tensors tell. ``groups``: inputs that may
    share a scale, beside whole rows. ``block_rows``: rows that share one too. ``zero_shift``: what
    a zero point is above its stored number. ``rounds_inputs``: activations have 8 bits too."""

    method: str
    layout: Layout
    bits: int = 0
    groups: tuple[int, ...] = ()
    block_rows: int = 1
    zero_shift: int = 0
    rounds_inputs: bool = False

    def matches_flag(self, name: str) -> bool:
        """Whether ``--quantization name`` means this checkpoint's own numbers."""
        if name == W8A8 and self.rounds_inputs:
            return True
        return self.method in ASKED.get(name, ())


def parse_integers(stated: Mapping[str, Any]) -> IntegerQuant | None:
    """Of a ``quantization_config``; None for other methods, ConfigError for what cannot be read."""
    method = str(stated.get("quant_method", "")).lower()
    if method == AWQ:
        return _awq(stated)
    if method == GPTQ:
        return _gptq(stated)
    if method == COMPRESSED:
        return _compressed(stated)
    if method == W8A8:
        return IntegerQuant(W8A8, "compressed", rounds_inputs=True)
    if method == BLOCKWISE:
        rows, inputs = _block(stated.get("weight_block_size"))
        return IntegerQuant(
            BLOCKWISE, "compressed", 8, (inputs,), block_rows=rows, rounds_inputs=True
        )
    return None


def _awq(stated: Mapping[str, Any]) -> IntegerQuant:
    version = str(stated.get("version", "gemm")).lower()
    if version not in _AWQ_VERSIONS:
        raise _refused(f"awq in the layout {version!r}", "version", _AWQ_VERSIONS)
    bits = _bits(AWQ, stated.get("bits", stated.get("w_bit", 4)), (4,))
    group = stated.get("group_size", stated.get("q_group_size", 128))
    return IntegerQuant(AWQ, "awq", bits, _group(AWQ, group))


def _gptq(stated: Mapping[str, Any]) -> IntegerQuant:
    layout = str(stated.get("checkpoint_format") or "gptq").lower()
    if stated.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _GPTQ_FORMATS:
        raise _refused(f"gptq in the layout {layout!r}", "checkpoint_format", tuple(_GPTQ_FORMATS))
    bits = _bits(GPTQ, stated.get("bits", 4), (4, 8))
    groups = _group(GPTQ, stated.get("group_size", 128))
    dynamic = stated.get("dynamic")
    if isinstance(dynamic, dict) and dynamic:  # layers with bits and groups of their own
        bits, groups = 0, GROUP_SIZES
    return IntegerQuant(GPTQ, "gptq", bits, groups, zero_shift=_GPTQ_FORMATS[layout])


def _compressed(stated: Mapping[str, Any]) -> IntegerQuant | None:
    config = stated.get("config_groups")
    groups = [g for g in config.values() if isinstance(g, dict)] if isinstance(config, dict) else []
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    if not weights or any(w.get("type", "int") != "int" for w in weights):
        return None
    formats = {str(one.get("format")) for one in (stated, *groups) if one.get("format")}
    for layout in sorted(formats - {*_FORMATS, "mixed-precision"}):
        raise _refused(f"compressed-tensors in the format {layout!r}", "format", _FORMATS)
    sparsity = stated.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ConfigError("quantization_config: sparse compressed-tensors cannot be loaded")
    if stated.get("transform_config"):
        raise ConfigError("quantization_config: transform_config (rotations) cannot be computed")
    sizes: set[int] = set()
    for one in weights:
        _bits(COMPRESSED, one.get("num_bits", 8), (4, 8))
        strategy = str(one.get("strategy") or ("group" if one.get("group_size") else "channel"))
        if strategy not in _STRATEGIES:
            raise _refused(f"integers with scales by {strategy}", "strategy", _STRATEGIES)
        if strategy == "group":
            sizes.update(_group(COMPRESSED, one.get("group_size")))
    blocks = [w.get("block_structure") for w in weights if w.get("strategy") == "block"]
    rows, inputs = _block(blocks[0]) if blocks else (1, 0)
    rounds = any(isinstance(g.get("input_activations"), dict) for g in groups)
    return IntegerQuant(
        COMPRESSED,
        "compressed",
        groups=tuple(sorted(sizes | {inputs} - {0})),
        block_rows=rows,
        rounds_inputs=rounds,
    )


def _bits(method: str, bits: object, known: tuple[int, ...]) -> int:
    if isinstance(bits, int) and not isinstance(bits, bool) and bits in known:
        return bits
    raise _refused(f"{method} of {bits!r:.40} bits", "bits", known)


def _group(method: str, group: object) -> tuple[int, ...]:
    """The one size of groups, none for whole rows."""
    if group == -1 and not isinstance(group, bool):
        return ()
    if isinstance(group, int) and group in GROUP_SIZES:
        return (group,)
    raise _refused(f"{method} in groups of {group!r:.40}", "group_size", (-1, *GROUP_SIZES))


def _block(block: object) -> tuple[int, int]:
    match block:
        case [int(rows), int(inputs)] if 0 < rows < 1 << 31 and 0 < inputs < 1 << 31:
            return rows, inputs
    raise ConfigError(f"quantization_config: a block size has two sizes, not {block!r:.60}")


def _refused(what: str, key: str, known: tuple[object, ...]) -> ConfigError:
    names = ", ".join(str(one) for one in known)
    return ConfigError(f"quantization_config: {what} cannot be loaded; known {key}: {names}")
