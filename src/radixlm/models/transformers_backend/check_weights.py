"""Check weights that transformers has loaded, and name file and tensor: its own errors name
parameters only, and it does not check the numbers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from radixlm.base.errors import CheckpointError
from radixlm.weights.folder import open_folder
from radixlm.weights.origin import Origin, describe_files, describe_origins, non_finite_kind
from radixlm.weights.param_reader import MAX_LISTED, listing
from radixlm.weights.source import TensorSource


def check_report(
    report: Mapping[str, Any],
    folder: Path,
    what: str,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """CheckpointError if a wanted name is among the ``missing_keys`` or ``mismatched_keys`` of the
    load of ``what``."""
    missing = [name for name in report["missing_keys"] if is_wanted(name)]
    misshapen = [one for one in report["mismatched_keys"] if is_wanted(one[0])]
    if not missing and not misshapen:
        return
    source = open_folder(folder, "auto")
    where = describe_files(source.files(), folder)
    problems = [f"missing from {where}: {name}" for name in sorted(missing)[:MAX_LISTED]]
    for name, *shapes in sorted(misshapen)[:MAX_LISTED]:
        size = f" is {list(shapes[1])}, the checkpoint has {list(shapes[0])}" if shapes else ""
        found = describe_origins(_likely(source, name), folder, shapes=True)
        problems.append(f"misshapen: {name}{size} ({found or where})")
    count = f"of {what} {len(missing)} tensors are missing, {len(misshapen)} misshapen"
    raise CheckpointError(listing(f"{folder}: {count}", problems))


def check_numbers(module: nn.Module, folder: Path, what: str) -> None:
    """CheckpointError for weights that hold NaN or infinity, naming the files that hold them."""
    bad = [name for name, value in module.named_parameters() if non_finite_kind(value.detach())]
    if not bad:
        return
    source = open_folder(folder, "auto")
    origins = [origin for name in source.sizes() for origin in source.origins(name)]
    found = [origin for origin in origins if non_finite_kind(origin.read())]
    where = describe_origins(found, folder) or describe_files(source.files(), folder)
    message = f"weights of {what} hold NaN or infinity: {', '.join(bad[:3])}"
    raise CheckpointError(f"{folder}: {message} ({where})")


def _likely(source: TensorSource, name: str) -> list[Origin]:
    """The tensors whose names share the longest end with a parameter's."""
    ends = {one: _common_end(one.split("."), name.split(".")) for one in source.sizes()}
    longest = max(ends.values(), default=0)
    return [o for one, end in ends.items() if end == longest > 0 for o in source.origins(one)]


def _common_end(one: list[str], other: list[str]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
