"""PyTorch .bin and .pt files, read with ``weights_only=True``: nothing in them is executed."""

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource

_GLOBAL = re.compile(r"GLOBAL [\w.]+")


class PickleSource(TensorSource):
    """All tensors of some pickled state dicts, memory-mapped if the file's format allows it."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._tensors: dict[str, Tensor] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            state = load_state_dict(file)
            duplicates = self._file_of.keys() & state.keys()
            if duplicates:
                name = min(duplicates)
                other = self._file_of[name].name
                raise CheckpointError(f"{file}: {name} is also in another file, {other}")
            self._tensors |= state
            self._file_of |= dict.fromkeys(state, file)

    def sizes(self) -> Mapping[str, int]:
        return {name: tensor.nbytes for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def release(self, name: str) -> None:
        # Another name may share the storage (tied weights): only this reference is dropped.
        self._tensors.pop(name, None)

    def origins(self, name: str) -> Sequence[Origin]:
        return [Origin(self._file_of[name], name, lambda: self.read(name))]

    def files(self) -> Sequence[Path]:
        return self._files


def load_file(file: Path) -> object:
    """What a file holds: tensors, numbers and containers of them. CheckpointError for more."""
    try:
        return _load(file)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))  # torch's advice is to trust the file
        reason = found[0] if found else str(error).splitlines()[0]
        raise CheckpointError(
            f"{file}: holds more than tensors, or is damaged; save the model as safetensors "
            f"({reason})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).split(". ")[0]  # advice and a stack follow
        raise CheckpointError(f"{file}: truncated or no PyTorch file ({reason})") from error


def load_state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors of one file; CheckpointError for anything that is not a plain state dict."""
    state = load_file(file)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            is_hqq = isinstance(value, dict) and "W_q" in value
            hint = "; save a model of HQQ by transformers, as safetensors" if is_hqq else ""
            raise CheckpointError(
                f"{file}: {name!r} is a {type(value).__name__}, not a tensor{hint}"
            )
    return dict(state)


def _load(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # the format before PyTorch 1.6
            raise
        return torch.load(file, map_location="cpu", weights_only=True)
