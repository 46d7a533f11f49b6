"""What a checkpoint's own ``quantization_config`` says: e4m3 weights with a scale a tensor, a row
or a block (fp8, fbgemm_fp8, compressed-tensors, modelopt), or integers (``quant/integers.py``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from radixlm.arch.json_file import object_or_empty
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import Record
from radixlm.kernels.ops.fp8 import BLOCK, FORMATS
from radixlm.quant.integers import AWQ, GPTQ, IntegerQuant, parse_integers

log = logging.getLogger(__name__)

BY_ROW, BY_BLOCK = FORMATS
GGUF = "gguf"  # our own word for what is in a GGUF file: nothing to widen by this package
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", GGUF)
_NESTED = ("text_config", "llm_config", "language_config")
_OWN_FILES = ("quantize_config.json", "quant_config.json")  # of older tools


class CheckpointQuant(Record):
    """``block``: rows and inputs that share a scale where scales are a matrix. ``fmt``: the format
    of kernels/ops/fp8.py that keeps the numbers."""

    method: str
    fmt: str
    block: tuple[int, int] = (BLOCK, BLOCK)


StoredQuant = CheckpointQuant | IntegerQuant


def checkpoint_quant(folder: Path) -> StoredQuant | None:
    """How the weights of ``folder`` are stored; None for floats and for methods that this package
    does not read: a warning names them, since their weights may yet be floats (the loader refuses
    all others). CheckpointError for numbers in a layout that cannot be computed."""
    file = folder / "config.json"
    stated = _stated(folder)
    if stated is None:
        found = next((name for name in _OWN_FILES if (folder / name).is_file()), None)
        if found is None:
            return None
        file = folder / found
        stated = {"quant_method": _method_of_old(object_or_empty(file)), **object_or_empty(file)}
    try:
        found_quant = parse(stated) or parse_integers(stated)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    method = str(stated.get("quant_method") or "")
    if found_quant is None and method:
        _warn_of_unread(file, method)
    return found_quant


@cache  # a server asks several times
def _warn_of_unread(file: Path, method: str) -> None:
    log.warning(
        "%s: quantization_config says %s in a layout that is not read: weights that are floats "
        "are served as floats, any others are refused (--quantization packs floats at load)",
        file,
        method[:80],
    )


def _method_of_old(stated: Mapping[str, Any]) -> str:
    """By the keys that only the one tool wrote."""
    return AWQ if {"w_bit", "zero_point"} & stated.keys() else GPTQ


def _stated(folder: Path) -> Mapping[str, Any] | None:
    """The quantization_config of config.json."""
    config = object_or_empty(folder / "config.json")
    stated = config.get("quantization_config") or config.get("compression_config")
    for key in _NESTED:
        nested = config.get(key)
        if not stated and isinstance(nested, dict):
            stated = nested.get("quantization_config")
    return stated if isinstance(stated, dict) else None


def parse(stated: Mapping[str, Any]) -> CheckpointQuant | None:
    """Of a ``quantization_config``; see ``checkpoint_quant``, here ConfigError."""
    method = str(stated.get("quant_method", ""))
    if method == "fp8":
        return _sized(method, stated.get("weight_block_size"))
    if method == GGUF:
        return CheckpointQuant(method, "")
    if method == "fbgemm_fp8":
        return CheckpointQuant(method, BY_ROW)
    if method == "modelopt":
        is_fp8 = str(stated.get("quant_algo", "")).upper() == "FP8"
        return CheckpointQuant(method, BY_ROW) if is_fp8 else None
    if method == "compressed-tensors":
        return _compressed(stated)
    return None


def _compressed(stated: Mapping[str, Any]) -> CheckpointQuant | None:
    groups = stated.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in values if isinstance(group, dict)]
    found = [w for w in weights if isinstance(w, dict)]
    if not found or any((w.get("type"), w.get("num_bits")) != ("float", 8) for w in found):
        return None
    strategies = {str(w.get("strategy")) for w in found}
    if not strategies <= {"tensor", "channel", "block"}:
        raise ConfigError(
            "quantization_config: 8 bit floats with scales by "
            f"{', '.join(sorted(strategies))} cannot be loaded; known: tensor, channel, block"
        )
    blocks = [w.get("block_structure") for w in found if w.get("strategy") == "block"]
    return _sized("compressed-tensors", blocks[0] if blocks else None)


def _sized(method: str, block: object) -> CheckpointQuant:
    if block is None:
        return CheckpointQuant(method, BY_ROW)
    match block:
        case [int(rows), int(inputs)] if 0 < rows < 1 << 31 and 0 < inputs < 1 << 31:
            fmt = BY_BLOCK if (rows, inputs) == (BLOCK, BLOCK) else BY_ROW
            return CheckpointQuant(method, fmt, (rows, inputs))
    raise ConfigError(f"quantization_config: a block size has two sizes, not {block!r:.60}")
