"""Origin: the file and the name of a tensor, for error messages."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.record import Record

MAX_NAMES, MAX_FILES = 3, 4  # of one file, and of one message


class Origin(Record):
    """A tensor of a file, under its name in the file. ``read`` returns the tensor."""

    file: Path
    name: str
    read: Callable[[], Tensor]


def non_finite_kind(value: Tensor) -> str:
    """ "NaN", "infinity", or "" if all numbers are finite. One pass over the data: a sum is not
    finite if a number is not. The sum is taken in the data's own dtype, which is many times faster
    but may overflow; only then is each number looked at."""
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
    """The origins that hold NaN or infinity; all of them if none does."""
    return [origin for origin in origins if non_finite_kind(origin.read())] or origins


def describe_origins(origins: Iterable[Origin], folder: Path, shapes: bool = False) -> str:
    """ "FILE: TENSOR, TENSOR; FILE: TENSOR", files relative to ``folder``, with the tensors' shapes
    if ``shapes``."""
    by_file: dict[Path, dict[str, None]] = {}
    for origin in origins:
        tensor = f"{origin.name} {list(origin.read().shape)}" if shapes else origin.name
        by_file.setdefault(origin.file, {})[tensor] = None
    parts = []
    for file, names in list(by_file.items())[:MAX_FILES]:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        parts.append(f"{relative_name(folder, file)}: {', '.join(list(names)[:MAX_NAMES])}{more}")
    more = f"; and {len(by_file) - MAX_FILES} more files" if len(by_file) > MAX_FILES else ""
    return "; ".join(parts) + more


def describe_files(files: Sequence[Path], folder: Path) -> str:
    """The files relative to ``folder``; the first and the last if there are several."""
    names = [relative_name(folder, file) for file in files]
    return ", ".join(names) if len(names) < 2 else f"{names[0]} to {names[-1]}"


def relative_name(folder: Path, file: Path) -> str:
    """The file's path relative to ``folder``, or its full path if it is elsewhere."""
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
