"""Writes the quantized checkpoint, tensor by tensor: memory holds one weight at a time.

Safetensors files of at most a given size, an index, and the other files of the source folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.weights.safetensors_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_COPIED = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".index.json",
    ".h5",
    ".msgpack",
    ".remote",
)


class Spec(Record):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: Path, specs: Iterable[Spec], values: Iterator[Tensor], most: int) -> int:
    """Write ``values``, which come in the order of ``specs``, to files of at most ``most`` bytes
    (or one tensor); the bytes written. The files get their names when all are whole."""
    shards = _shards(list(specs), most)
    weight_map: dict[str, str] = {}
    names = []
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        _write_file(folder / f"{name}.part", shard, values)
        names.append(name)
        weight_map |= {spec.name: name for spec in shard}
    for name in names:
        (folder / f"{name}.part").rename(folder / name)
    total = sum(spec.num_bytes for shard in shards for spec in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def _shards(specs: list[Spec], most: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def _write_file(path: Path, specs: list[Spec], values: Iterator[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for spec in specs:
        end = place + spec.num_bytes
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": (place, end)
        }  # fmt: skip
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            value = next(values)
            assert (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype), spec.name
            flat = value.contiguous().reshape(-1).view(torch.uint8)
            file.write(flat.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def copy_others(source: Path, target: Path) -> None:
    """Tokenizer, templates and whatever else is no weight; not config.json, nor folders."""
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, target / path.name)
