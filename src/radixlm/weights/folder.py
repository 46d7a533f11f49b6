"""Which files of a checkpoint folder hold the weights, and the source that reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from radixlm.arch.gguf import first_parts
from radixlm.arch.sentence_transformers import dense_folders
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.quant.checkpoint import GGUF, checkpoint_quant
from radixlm.quant.integers import IntegerQuant
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.fp8_source import Fp8Source
from radixlm.weights.gguf_file import GgufSource
from radixlm.weights.integer_source import IntegerSource
from radixlm.weights.joined import JoinedSource, current_name
from radixlm.weights.merged_adapter import with_merged_adapter
from radixlm.weights.npcache import open_npcache
from radixlm.weights.origin import relative_name
from radixlm.weights.pickle_file import PickleSource
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, numbered_files, shard_files

_PACKED = (".qweight", ".weight_packed")  # whose numbers mean nothing by themselves
# What trainers and other loaders leave beside the weights.
_NOT_WEIGHTS = ("consolidated", "adapter_", "optimizer", "scheduler", "training_args", "rng_state")


def open_folder(folder: Path, load_format: str, dtype: torch.dtype | None = None) -> TensorSource:
    """The weights of ``folder``, and as "2_Dense.linear.weight" those of the further layers of a
    sentence-transformers folder; CheckpointError if there are none. Quantized ones are widened to
    ``dtype``, or to what config.json says."""
    dtype = dtype or checkpoint_dtype(folder)
    layers = {name: _open(folder / name, load_format, dtype) for name in dense_folders(folder)}
    source = with_merged_adapter(folder, _open(folder, load_format, dtype))
    source = _with_scales(folder, source, dtype)
    is_old = any(current_name(name) != name for name in source.sizes())
    return JoinedSource(source, layers) if layers or is_old else source


def _with_scales(folder: Path, source: TensorSource, dtype: torch.dtype) -> TensorSource:
    quant = checkpoint_quant(folder)
    if isinstance(quant, IntegerQuant):
        return IntegerSource(source, quant, dtype)
    if quant is not None and quant.method != GGUF:
        return Fp8Source(source, quant.block, dtype)
    narrow = next((name for name in source.sizes() if name.endswith(_PACKED)), None)
    if quant is None and narrow is not None:
        where = relative_name(folder, source.origins(narrow)[0].file)
        raise CheckpointError(
            f"{folder / 'config.json'}: no quantization_config that can be read says what the "
            f"integers of {narrow} are ({where}: {narrow})"
        )
    return source


def _open(folder: Path, load_format: str, dtype: torch.dtype) -> TensorSource:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    if load_format in ("auto", "safetensors"):
        files = find_files(folder, (".safetensors",))
        if files or load_format == "safetensors":
            return SafetensorsSource(_some(folder, files, "*.safetensors"))
        if _ggufs(folder) and not find_pickles(folder):
            return _open_gguf(folder, _ggufs(folder), dtype)
        return PickleSource(_some(folder, find_pickles(folder), "*.safetensors or *.bin"))
    if load_format == "gguf":
        return _open_gguf(folder, _ggufs(folder), dtype)
    if load_format == "pt":
        return PickleSource(_some(folder, find_pickles(folder), "*.bin or *.pt"))
    if load_format == "npcache":
        return open_npcache(folder, find_pickles(folder))
    raise ConfigError(
        f"--load-format {load_format!r} is not available; choose one of: "
        "auto, safetensors, pt, npcache, gguf, dummy, sharded_state"
    )


def _ggufs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def _open_gguf(folder: Path, files: list[Path], dtype: torch.dtype) -> TensorSource:
    models = first_parts(_some(folder, files, "*.gguf"))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise CheckpointError(f"{folder}: has GGUF files of several models: {names}")
    return GgufSource(models[0], dtype)


def find_pickles(folder: Path) -> list[Path]:
    """The folder's .bin files, else its .pt files."""
    return find_files(folder, (".bin",)) or find_files(folder, (".pt", ".pth"))


def find_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Weight files of these endings: those of the index, or all."""
    for ending in endings:
        stem = "model" if ending == ".safetensors" else "pytorch_model"
        index = folder / f"{stem}{ending}.index.json"
        if index.is_file():
            return shard_files(folder, index)
    files = [
        file
        for file in folder.iterdir()
        if file.name.endswith(endings) and not file.name.startswith(_NOT_WEIGHTS)
    ]
    return numbered_files(folder, files)


def index_of(folder: Path) -> Path | None:
    """The safetensors index of the folder, if it has one."""
    index = folder / "model.safetensors.index.json"
    return index if index.is_file() else None


def _some(folder: Path, files: list[Path], pattern: str) -> list[Path]:
    if not files:
        raise CheckpointError(f"{folder} holds no weights ({pattern})")
    return files
