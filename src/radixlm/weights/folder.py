"""Opens a checkpoint folder: finds the files with weights, and chains the sources that read them:
files -> merged adapter -> dequantized -> renamed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.arch.gguf import first_parts
from radixlm.arch.sentence_transformers import dense_folders
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.lazy import load
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.gguf_file import GgufSource
from radixlm.weights.merged_adapter import with_merged_adapter
from radixlm.weights.npcache import open_npcache
from radixlm.weights.options import DEFAULT, LoadOptions
from radixlm.weights.origin import Origin, relative_name
from radixlm.weights.overlay import Deltas, Fused
from radixlm.weights.pickle_file import PickleSource
from radixlm.weights.remote.place import is_place
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, numbered_files, shard_files

REMOTE = ("remote", "remote_instance")  # weights that are not in the folder
_SAME = {
    **dict.fromkeys(("layered", "bitsandbytes", "mistral"), "auto"),
    "fastsafetensors": "safetensors",
}
_PACKED = (".qweight", ".weight_packed")  # whose numbers mean nothing without their layout
_ANY = "*.safetensors or *.bin"
# files of trainers and other loaders beside the weights
_NOT_WEIGHTS = ("consolidated", "adapter_", "optimizer", "scheduler", "training_args", "rng_state")
# how the first BERT checkpoints name the weights of a norm
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def open_folder(
    folder: Path,
    load_format: str,
    dtype: torch.dtype | None = None,
    deltas: Sequence[Path] = (),
    fused: Fused = None,
    options: LoadOptions = DEFAULT,
) -> TensorSource:
    """The weights of ``folder``, dequantized to ``dtype`` (None: what config.json says) unless a
    layer keeps them quantized. The dense layers of a sentence-transformers folder are named as
    "2_Dense.linear.weight". ``deltas``: folders of tensors that replace some, as the checkpoint
    stores them or as floats, or several as one that ``fused`` knows. CheckpointError if there are
    no weights."""
    if load_format == "auto" and is_place(folder):
        load_format = "remote"
    own = sorted(folder.glob("deltas/*")) if load_format in REMOTE else []  # of a seed's updates
    later = Deltas([*own, *deltas])
    source = open_files(folder, load_format, dtype, options)
    source = later.over(with_merged_adapter(folder, source))
    source = _dequantized(folder, source, dtype)
    inner = "auto" if load_format in REMOTE else load_format  # small, so they lie in the folder
    layers = {name: open_files(folder / name, inner, dtype) for name in dense_folders(folder)}
    return later.finish(_renamed(source, layers), fused)


def _dequantized(folder: Path, source: TensorSource, dtype: torch.dtype | None) -> TensorSource:
    """``source`` with the weights dequantized that config.json says are quantized."""
    quant = checkpoint_quant(folder)
    if quant is not None:
        if not quant.source:
            return source
        wrapped: TensorSource = load(quant.source)(source, quant, dtype or checkpoint_dtype(folder))
        return wrapped
    packed = next((name for name in source.sizes() if name.endswith(_PACKED)), None)
    if packed is not None:
        where = relative_name(folder, source.origins(packed)[0].file)
        raise CheckpointError(
            f"{folder / 'config.json'}: no quantization_config that can be read says what the "
            f"integers of {packed} are ({where}: {packed})"
        )
    return source


def _renamed(source: TensorSource, layers: Mapping[str, TensorSource]) -> TensorSource:
    """``source`` under current names, with the tensors of ``layers`` as "<layer>.<name>"."""
    is_old = any(current_name(name) != name for name in source.sizes())
    return RenamedSource(source, layers) if layers or is_old else source


class RenamedSource(TensorSource):
    """The tensors of ``main`` under current names, and those of each of ``parts`` as
    "<part>.<name>"."""

    def __init__(self, main: TensorSource, parts: Mapping[str, TensorSource]) -> None:
        self._sources = (main, *parts.values())
        self._stored = {current_name(name): (main, name) for name in main.sizes()}
        for part, source in parts.items():
            self._stored |= {f"{part}.{name}": (source, name) for name in source.sizes()}

    def sizes(self) -> Mapping[str, int]:
        return {name: source.sizes()[stored] for name, (source, stored) in self._stored.items()}

    def read(self, name: str) -> Tensor:
        source, stored = self._stored[name]
        return source.read(stored)

    def release(self, name: str) -> None:
        source, stored = self._stored[name]
        source.release(stored)

    def origins(self, name: str) -> Sequence[Origin]:
        source, stored = self._stored[name]
        return source.origins(stored)

    def expect(self, origins: Sequence[Origin]) -> None:
        for source in self._sources:
            source.expect(origins)

    def place(self, origin: Origin) -> tuple[int, int] | None:
        return self._sources[0].place(origin)

    def finish(self) -> None:
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def files(self) -> Sequence[Path]:
        return [file for source in self._sources for file in source.files()]


def current_name(name: str) -> str:
    """The name that a tensor of an old checkpoint has in newer ones."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def open_files(
    folder: Path, load_format: str, dtype: torch.dtype | None, options: LoadOptions = DEFAULT
) -> TensorSource:
    """The weight files of one folder, read as ``--load-format`` says."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    # any format is loaded layer by layer
    load_format = _SAME.get(load_format, load_format)
    if load_format in ("auto", "safetensors"):
        files = find_files(folder, (".safetensors",))
        if files or load_format == "safetensors":
            return _open_safetensors(folder, files, options)
        if _ggufs(folder) and not find_pickles(folder):
            return _open_gguf(folder, dtype)
        return PickleSource(_not_empty(folder, find_pickles(folder), _ANY))
    if load_format == "gguf":
        return _open_gguf(folder, dtype)
    if load_format == "pt":
        return PickleSource(_not_empty(folder, find_pickles(folder), "*.bin or *.pt"))
    if load_format in REMOTE:
        remote: TensorSource = load("radixlm.weights.remote.source:open_remote")(folder, options)
        return remote
    if load_format == "npcache":
        return open_npcache(folder, find_pickles(folder))
    raise ConfigError(
        f"--load-format {load_format!r} is not available; choose one of: "
        "auto, safetensors, fastsafetensors, layered, pt, npcache, gguf, bitsandbytes, dummy, "
        "sharded_state, remote, remote_instance, mistral"
    )


def _open_safetensors(folder: Path, files: list[Path], options: LoadOptions) -> TensorSource:
    _not_empty(folder, files, "*.safetensors")
    if not options.num_threads:
        return SafetensorsSource(files, index_of(folder))
    opener = load("radixlm.weights.remote.source:open_threaded")
    threaded: TensorSource = opener(folder, files, options)
    return threaded


def _ggufs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def _open_gguf(folder: Path, dtype: torch.dtype | None) -> TensorSource:
    models = first_parts(_not_empty(folder, _ggufs(folder), "*.gguf"))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise CheckpointError(f"{folder}: has GGUF files of several models: {names}")
    # a dtype that --dtype names dequantizes all blocks
    return GgufSource(models[0], dtype or checkpoint_dtype(folder), keeps_quantized=dtype is None)


def find_pickles(folder: Path) -> list[Path]:
    """The folder's .bin files, else its .pt files."""
    return find_files(folder, (".bin",)) or find_files(folder, (".pt", ".pth"))


def find_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Weight files with these endings: those that the index names, or all."""
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


def _not_empty(folder: Path, files: list[Path], pattern: str) -> list[Path]:
    if not files:
        hint = (
            "; copy them there, or use --load-format dummy for random ones"
            if pattern == _ANY
            else "; --load-format auto reads what is there"
        )
        raise CheckpointError(f"{folder} holds no weights ({pattern}){hint}")
    return files
