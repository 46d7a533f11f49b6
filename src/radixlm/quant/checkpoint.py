"""How a checkpoint stores quantized weights, by the ``quantization_config`` of its config.json."""

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from radixlm.arch.json_file import object_or_empty
from radixlm.arch.quant_methods import ALIASES, METHODS, TABLES
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.quant.prequantized import PrequantizedScheme
from radixlm.quant.scheme import Scheme

log = logging.getLogger(__name__)

_NESTED = ("text_config", "llm_config", "language_config")
# of older tools, and of ModelOpt
_OLD_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_AWQ_KEYS = {"w_bit", "zero_point"}  # which only AWQ's old tool wrote


class StoredQuant(Record):
    """The quantized weights of one checkpoint. ``method``: a name of ``arch/quant_methods.py``."""

    method: str
    # "module:class" of the TensorSource that dequantizes them; "": the files' own source does
    source: ClassVar[str] = ""

    def matches_flag(self, flag: str) -> bool:
        """Whether ``--quantization flag`` means the checkpoint's own numbers."""
        return flag in METHODS[self.method].flags

    def scheme(self) -> Scheme:
        """The scheme that keeps the checkpoint's numbers: integers as they are stored; numbers that
        no kernel multiplies are dequantized."""
        return PrequantizedScheme()


def checkpoint_quant(folder: Path) -> StoredQuant | None:
    """How the weights of ``folder`` are quantized. None for floats and for methods that are not
    read: a warning names them, because their weights may still be floats (the loader refuses all
    others). CheckpointError for a layout that cannot be computed."""
    file = folder / "config.json"
    config = _quantization_config(folder)
    if config is None:
        old_file = next((name for name in _OLD_FILES if (folder / name).is_file()), None)
        if old_file is None:
            return None
        file = folder / old_file
        config = object_or_empty(file)
        method = "awq" if _AWQ_KEYS & config.keys() else "gptq"
        method = "modelopt" if old_file == _OLD_FILES[-1] else method
        config = {"quant_method": method, **config}
    try:
        quant = parse(config)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if quant is None and config.get("quant_method"):
        _warn_of_unread(file, str(config["quant_method"]))
    return quant


def parse(config: Mapping[str, Any]) -> StoredQuant | None:
    """Read a ``quantization_config``; None and ConfigError as in ``checkpoint_quant``."""
    name = str(config.get("quant_method", "")).lower()
    if name in TABLES:
        raise ConfigError(
            f"quantization_config: {name} (tables of vectors) cannot be loaded; take the model's "
            "float checkpoint and --quantization int4wo-64"
        )
    method = METHODS.get(ALIASES.get(name, name))
    if method is None:
        return None
    made: Any = load(method.parse)
    quant: StoredQuant | None = made(method.name if isinstance(made, type) else config)
    return quant


@cache  # a server asks several times
def _warn_of_unread(file: Path, method: str) -> None:
    log.warning(
        "%s: quantization_config says %s in a layout that is not read: weights that are floats "
        "are served as floats, any others are refused (--quantization packs floats at load)",
        file,
        method[:80],
    )


def _quantization_config(folder: Path) -> Mapping[str, Any] | None:
    config = object_or_empty(folder / "config.json")
    found = config.get("quantization_config") or config.get("compression_config")
    for key in _NESTED:
        nested = config.get(key)
        if not found and isinstance(nested, dict):
            found = nested.get("quantization_config")
    if not isinstance(found, dict):
        return None
    # DeepSeek V4 says beside it what experts are
    return {"expert_dtype": config.get("expert_dtype"), **found}


def block_sizes(block: object) -> tuple[int, int]:
    """(rows, inputs) that share a scale; ConfigError for anything that is not two sizes."""
    match block:
        case [int(rows), int(inputs)] if 0 < rows < 1 << 31 and 0 < inputs < 1 << 31:
            return rows, inputs
    raise ConfigError(f"quantization_config: a block size has two sizes, not {block!r:.60}")
