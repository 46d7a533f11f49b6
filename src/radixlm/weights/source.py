"""TensorSource: the tensors of a checkpoint folder, whatever the file format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.weights.origin import Origin

_PART = re.compile(r"-(\d+)-of-(\d+)\.")


class TensorSource(Protocol):
    """Named tensors that are read one at a time."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor, by name."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU; it may be a view of the file: copy what you keep."""
        ...

    def release(self, name: str) -> None:
        """The caller is done with the tensor: its memory may go."""
        ...

    def origins(self, name: str) -> Sequence[Origin]:
        """The tensors of files that make this one, for messages."""
        ...

    def files(self) -> Sequence[Path]:
        """Every file that was looked into."""
        ...


def shard_files(folder: Path, index: Path) -> list[Path]:
    """Files that an index.json names; CheckpointError for a bad index or a missing file."""
    try:
        entries = json.loads(index.read_bytes())["weight_map"].values()
        names = sorted(set(entries))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a weight index ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in this folder")
    return _all_present(folder, names, str(index))


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor by an index (``shard_files`` has checked its form)."""
    promises: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return promises


def numbered_files(folder: Path, files: Iterable[Path]) -> list[Path]:
    """``files``, after a check that none of a "-00001-of-00003" series is missing."""
    present = sorted(files)
    wanted = set()
    for file in present:
        part = _PART.search(file.name)
        if part:
            start, end = part.span(1)
            for number in range(1, int(part[2]) + 1):
                digits = f"{number:0{end - start}d}"
                wanted.add(file.name[:start] + digits + file.name[end:])
    _all_present(folder, sorted(wanted), str(folder))
    return present


def _all_present(folder: Path, names: Iterable[str], where: str) -> list[Path]:
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{where}: missing files: {', '.join(missing)}")
    return files
