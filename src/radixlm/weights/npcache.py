"""``--load-format npcache``: .bin files are unpickled once and stored as .npy files, which later
starts map into memory. numpy has no bfloat16: such a tensor is stored as its raw bits."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.weights.origin import Origin
from radixlm.weights.pickle_file import PickleSource
from radixlm.weights.source import TensorSource

INDEX = "weight_names.json"
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class NpcacheSource(TensorSource):
    """The tensors of a cache folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            index = json.loads((folder / INDEX).read_bytes())
            self._dtypes = {
                _file_name(name): getattr(torch, dtype) for name, dtype in index.items()
            }
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{folder / INDEX}: damaged ({error}); delete {folder}"
            ) from error

    def sizes(self) -> Mapping[str, int]:
        try:
            return {name: self._file(name).stat().st_size for name in self._dtypes}
        except OSError as error:
            message = f"missing ({error.strerror}); delete {self._folder}"
            raise CheckpointError(f"{error.filename}: {message}") from error

    def read(self, name: str) -> Tensor:
        file = self._file(name)
        try:
            array = np.load(file, mmap_mode="c", allow_pickle=False)
            return torch.from_numpy(array).view(self._dtypes[name])
        except (OSError, ValueError, RuntimeError, TypeError, EOFError) as error:
            message = f"{name} is damaged ({error}); delete {self._folder}"
            raise CheckpointError(f"{file}: {message}") from error

    def origins(self, name: str) -> Sequence[Origin]:
        return [Origin(self._file(name), name, lambda: self.read(name))]

    def files(self) -> Sequence[Path]:
        return [self._folder / INDEX]

    def _file(self, name: str) -> Path:
        return self._folder / f"{_file_name(name)}.npy"


def open_npcache(folder: Path, files: list[Path]) -> NpcacheSource:
    """The cache of ``files`` in ``folder``/np, which is written first if it is missing."""
    cache = folder / "np"
    if not (cache / INDEX).is_file():
        _make(cache, PickleSource(files))
    return NpcacheSource(cache)


def _make(cache: Path, source: PickleSource) -> None:
    try:
        cache.mkdir(exist_ok=True)
        index = {}
        for name in source.sizes():
            tensor = source.read(name).contiguous()
            index[name] = str(tensor.dtype).removeprefix("torch.")
            bits = tensor.view(_BITS[tensor.dtype.itemsize]) if tensor.ndim else tensor
            np.save(cache / f"{_file_name(name)}.npy", bits.numpy(), allow_pickle=False)
            source.release(name)
        # The index is written last and atomically: a cache without one is made again.
        temporary = cache / (INDEX + ".tmp")
        temporary.write_text(json.dumps(index))
        os.replace(temporary, cache / INDEX)
    except OSError as error:
        raise CheckpointError(f"{cache}: the numpy cache cannot be written: {error}") from error


def _file_name(name: str) -> str:
    if "/" in name or "\\" in name or name.startswith("."):
        raise CheckpointError(f"{name!r} cannot be the name of a file of the numpy cache")
    return name
