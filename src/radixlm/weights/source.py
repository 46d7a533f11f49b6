"""TensorSource: the tensors of a checkpoint folder, in any file format."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import DOWNLOAD_AGAIN, CheckpointError
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.origin import Origin

_PART = re.compile(r"-(\d{1,9})-of-(\d{1,9})\.")
_NAMED = 100  # missing files, at most


class TensorSource(ABC):
    """Named tensors that are read one at a time."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored, by name."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor on the CPU; it may be a view of the file: copy what you keep. ValueError for
        parts that are missing or do not fit each other."""

    def dtype(self, name: str) -> torch.dtype:
        """Of what ``read`` gives."""
        return self.read(name).dtype

    @abstractmethod
    def origins(self, name: str) -> Sequence[Origin]:
        """The tensors of files that make this one, for messages."""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """Every file that was opened."""

    def release(self, name: str) -> None:  # noqa: B027
        """The caller is done with the tensor: its memory may be freed."""

    def expect(self, origins: Sequence[Origin]) -> None:  # noqa: B027
        """The tensors of files in the order in which the caller will read them, for sources that
        read ahead."""

    def place(self, origin: Origin) -> tuple[int, int] | None:
        """File number and first byte of a tensor of files, where reading in the files' order is
        faster; else None."""
        return None

    def finish(self) -> None:  # noqa: B027
        """The caller has read all that it needs. CheckpointError if the files as a whole are not
        what their store says."""

    def close(self) -> None:  # noqa: B027
        """End reads under way; tensors that were read stay."""

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored in 4 or 8 bits that a layer may keep."""
        return False

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A quantized weight as it is stored; None where the kernels cannot compute with it.
        ValueError as ``read``."""
        return None

    def is_zero_bias(self, name: str) -> bool:
        """Whether the tensor is an all-zero bias that a quantization tool added to a layer without
        a bias."""
        return False


class WrappedSource(TensorSource):
    """Base of sources that change some tensors of ``inner``. It passes every call on, except those
    about quantized weights: what a wrapper changes has no stored bits to keep."""

    def __init__(self, inner: TensorSource) -> None:
        self.inner = inner

    def sizes(self) -> Mapping[str, int]:
        return self.inner.sizes()

    def read(self, name: str) -> Tensor:
        return self.inner.read(name)

    def origins(self, name: str) -> Sequence[Origin]:
        return self.inner.origins(name)

    def files(self) -> Sequence[Path]:
        return self.inner.files()

    def release(self, name: str) -> None:
        self.inner.release(name)

    def expect(self, origins: Sequence[Origin]) -> None:
        self.inner.expect(origins)

    def place(self, origin: Origin) -> tuple[int, int] | None:
        return self.inner.place(origin)

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.inner.close()


def shard_files(folder: Path, index: Path) -> list[Path]:
    """Files that an index.json names; CheckpointError for a bad index or a missing file."""
    try:
        entries = json.loads(index.read_bytes())["weight_map"].values()
        names = sorted(set(entries))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{index}: not a weight index ({why}){DOWNLOAD_AGAIN}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in this folder")
    return _all_present(folder, names, str(index))


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index that ``shard_files`` has checked."""
    weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return weight_map


def numbered_files(folder: Path, files: Iterable[Path]) -> list[Path]:
    """``files``, after a check that none of a "-00001-of-00003" series is missing."""
    present = sorted(files)
    wanted = set()
    for file in present:
        part = _PART.search(file.name)
        if part:
            start, end = part.span(1)
            # beyond so many, files are missing in any case
            for number in range(1, min(int(part[2]), len(present) + _NAMED) + 1):
                digits = f"{number:0{end - start}d}"
                wanted.add(file.name[:start] + digits + file.name[end:])
    _all_present(folder, sorted(wanted), str(folder))
    return present


def _all_present(folder: Path, names: Iterable[str], where: str) -> list[Path]:
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{where}: missing files: {', '.join(missing)}; download or copy them into this folder"
        )
    return files
