"""Reads the files of sentence-transformers beside a checkpoint: modules.json, the folders that it
names, prompts and the maximum length. Imports neither torch nor sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.families.pools import pooled
from radixlm.arch.json_file import read_json, read_object
from radixlm.arch.names import Name
from radixlm.arch.spec import Decoder, Dense, Pool
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record, field, replace

# in the order in which the vectors of several modes are concatenated
_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean_tokens": "weighted",
    "lasttoken": "last",
}
_ACTS: Mapping[str, Any] = {
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


class DenseModule(Record):
    """A linear layer in a folder of its own."""

    folder: str
    layer: Dense


class SentenceTransformersConfig(Record):
    """A checkpoint folder of sentence-transformers. ``max_length`` is in tokens, 0 = not stated;
    ``prompts`` are put before texts, by name."""

    pooling: str
    dense: tuple[DenseModule, ...]
    is_normalised: bool
    max_length: int = 0
    is_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformers(folder: Path) -> SentenceTransformersConfig | None:
    """None where the folder has no modules.json; CheckpointError names a broken file."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    pooling, dense, is_normalised = "mean", list[DenseModule](), False
    for module in _modules(path):
        kind, sub = str(module.get("type", "")).rpartition(".")[2], str(module.get("path") or "")
        if is_normalised and kind in ("Pooling", "Dense"):
            raise CheckpointError(f"{path}: {kind} after Normalize is not supported")
        if kind == "Pooling":
            pooling = _pooling(folder / sub / "config.json")
        elif kind == "Dense":
            dense.append(DenseModule(sub, _dense(folder / sub / "config.json")))
        elif kind == "Normalize":
            is_normalised = True
        elif kind == "Transformer" and sub not in ("", "."):
            raise CheckpointError(f"{path}: the model is in {sub!r}: give that folder's files here")
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(f"{path}: the module {kind!r} is not supported")
    limits = _optional(folder / "sentence_bert_config.json")
    notes = _optional(folder / "config_sentence_transformers.json")
    prompts = notes.get("prompts") or {}
    return SentenceTransformersConfig(
        pooling,
        tuple(dense),
        is_normalised,
        max_length=_length(limits.get("max_seq_length")),
        is_lower_case=bool(limits.get("do_lower_case")),
        prompts={str(name): str(text) for name, text in dict(prompts).items()},
        default_prompt=notes.get("default_prompt_name"),
    )


def with_modules(decoder: Decoder, sentence: SentenceTransformersConfig, source: str) -> Decoder:
    """The model with the pooling and linear layers of ``sentence``; a model that gives scores is
    returned as it is."""
    if decoder.pool is not None and decoder.pool.gives == "scores":
        return decoder
    width = decoder.dim * (sentence.pooling.count("+") + 1)
    names: dict[str, Name] = {}
    for index, module in enumerate(sentence.dense):
        if module.layer.inputs != width:
            raise CheckpointError(
                f"{source}: {module.folder} takes {module.layer.inputs} channels, but gets {width}"
            )
        names[f"pool_{index}"] = f"{module.folder}.linear"
        width = module.layer.outputs
    pool = replace(
        decoder.pool or Pool(),
        pooling=sentence.pooling,
        head=tuple(module.layer for module in sentence.dense),
        after="unit" if sentence.is_normalised else "",
    )
    return pooled(decoder, pool, **names)


def dense_folders(folder: Path) -> list[str]:
    """Folders of linear layers, as modules.json names them."""
    sentence = read_sentence_transformers(folder)
    return [module.folder for module in sentence.dense] if sentence is not None else []


def _modules(path: Path) -> list[dict[str, Any]]:
    value = read_json(path)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise CheckpointError(f"{path} must hold a list of modules")
    return sorted(value, key=lambda module: int(module.get("idx", 0)))


def _pooling(path: Path) -> str:
    config = read_object(path)
    mode = config.get("pooling_mode")
    if isinstance(mode, str | list | tuple):  # newer files name the modes
        listed = [mode] if isinstance(mode, str) else list(mode)
        named = {name.removesuffix("_tokens").removesuffix("_token") for name in listed}
        short = {mode.removesuffix("_tokens").removesuffix("_token"): kind
                 for mode, kind in _MODES.items()}  # fmt: skip
        unknown = named - short.keys()
        modes = [kind for mode, kind in short.items() if mode in named]
    else:
        flags = {key: on for key, on in config.items() if key.startswith("pooling_mode_")}
        on = {key.removeprefix("pooling_mode_") for key, value in flags.items() if value}
        unknown, modes = on - _MODES.keys(), [kind for mode, kind in _MODES.items() if mode in on]
    if unknown or not modes:
        what = ", ".join(sorted(unknown)) or "none"
        raise CheckpointError(f"{path}: the pooling {what} is not supported")
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt false is not supported")
    return "+".join(modes)


def _dense(path: Path) -> Dense:
    config = read_object(path)
    act = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = act.rpartition(".")[2].removesuffix("()")
    if kind not in _ACTS:
        raise CheckpointError(f"{path}: activation_function {act!r} is not supported")
    sizes = [_length(config.get(key)) for key in ("in_features", "out_features")]
    if not all(sizes):
        raise CheckpointError(f"{path}: in_features and out_features must be positive integers")
    return Dense(sizes[0], sizes[1], _ACTS[kind], bool(config.get("bias", True)))


def _length(value: object) -> int:
    """A positive count, 0 for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
    return int(value) if is_count else 0  # type: ignore[call-overload]


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
