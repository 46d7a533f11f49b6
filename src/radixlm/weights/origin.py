"""Where tensors come from, and how messages name it: file and tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.record import Record

MAX_NAMES, MAX_FILES = 3, 4  # of one file, and of one message


class Origin(Record):
    """A tensor of a file, under its name there. ``read`` gives it again."""

    file: Path
    name: str
    read: Callable[[], Tensor]


def non_finite_kind(value: Tensor) -> str:
    """Either of "NaN" and "infinity", or "". One pass over the data: a sum is not finite if a
    number is not. It is taken in the data's own dtype, which is many times faster, and may
    overflow: each number is looked at then."""
    if not value.is_floating_point():
        return ""
    if value.dtype.itemsize == 1:  # such formats have no sums
        return "NaN" if bool(torch.isnan(value.float()).any()) else ""
    if bool(torch.isfinite(value.sum())):
        return ""
    if bool(torch.isnan(value).any()):
        return "NaN"
    return "infinity" if bool(torch.isinf(value).any()) else ""


def non_finite_origins(origins: Sequence[Origin]) -> Sequence[Origin]:
    """Those that hold NaN or infinity; all where none does."""
    return [origin for origin in origins if non_finite_kind(origin.read())] or origins


def describe_origins(origins: Iterable[Origin], folder: Path, shapes: bool = False) -> str:
    """ "FILE: TENSOR, TENSOR; FILE: TENSOR", files as seen from ``folder``, tensors with their
    shapes where those are wanted."""
    by_file: dict[Path, dict[str, None]] = {}
    for origin in origins:
        said = f"{origin.name} {list(origin.read().shape)}" if shapes else origin.name
        by_file.setdefault(origin.file, {})[said] = None
    parts = []
    for file, names in list(by_file.items())[:MAX_FILES]:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        parts.append(f"{relative_name(folder, file)}: {', '.join(list(names)[:MAX_NAMES])}{more}")
    more = f"; and {len(by_file) - MAX_FILES} more files" if len(by_file) > MAX_FILES else ""
    return "; ".join(parts) + more


def describe_files(files: Sequence[Path], folder: Path) -> str:
    """The files as seen from ``folder``, of several the first and the last."""
    names = [relative_name(folder, file) for file in files]
    return ", ".join(names) if len(names) < 2 else f"{names[0]} to {names[-1]}"


def relative_name(folder: Path, file: Path) -> str:
    """The file's path inside ``folder``, or its own."""
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
