"""Manifest: what a KV page is made of. Two engines with equal digests compute the same KV.

``digest`` seeds the page keys, so it has what the numbers mean. ``storage_digest`` also has how the
bytes lie and which part of a page they are: it names folders and objects of stored pages.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from radixlm.base.record import Record

FORMAT: Final = 1
_END_BYTES: Final = 64 << 10
_SAMPLE_BYTES, _SAMPLE_EVERY = 4096, 1 << 20
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".remote")


_TENSOR: Final = re.compile(r"\[(\d+), \*, ([\d, ]+)\] torch\.(\w+)")
_ITEM_BYTES: Final = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
}  # fmt: skip


class PageTensor(Record):
    """A tensor of a page: [layers, *shape] numbers of ``item_bytes`` each, in the page's bytes
    [start, end)."""

    layers: int
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    start: int
    end: int


@lru_cache(maxsize=256)
def page_tensors(layout: str, space: int) -> tuple[PageTensor, ...]:
    """The tensors of the pages of a space, by ``Manifest.layout``."""
    found: list[PageTensor] = []
    at = 0
    for layers, numbers, dtype in _TENSOR.findall(layout.partition(";")[2 * space]):
        shape, size = tuple(map(int, numbers.split(", "))), _ITEM_BYTES.get(dtype, 1)
        end = at + int(layers) * math.prod(shape) * size
        found.append(PageTensor(int(layers), shape, dtype, size, at, end))
        at = end
    return tuple(found)


class PageGroup(Record):
    """Layers with pages in one pool, by the numbers of the whole model. ``space`` 0: pages of the
    full page table, 1: of windows or recurrent states (then ``states``: the shapes of each layer).
    ``rope``: the kind of rotation, which stored keys contain."""

    space: int
    layers: tuple[int, ...]
    kv_heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    latent: bool = False
    window: int = 0
    rope: str = ""
    compress_ratio: int = 0
    states: tuple[str, ...] = ()


class Rectangle(Record):
    """The part of a page that one rank keeps: rank ``rank`` of ``num_ranks``, layers [first_layer,
    end_layer), KV heads [first_head, end_head) of the whole model."""

    rank: int = 0
    num_ranks: int = 1
    first_layer: int = 0
    end_layer: int = 0
    first_head: int = 0
    end_head: int = 0

    @property
    def name(self) -> str:
        return (
            f"L{self.first_layer}-{self.end_layer}_H{self.first_head}-{self.end_head}"
            f"_R{self.rank}-{self.num_ranks}"
        )


class Manifest(Record):
    """``kv_dtype``: and its scheme, such as "torch.int8, a scale a row". ``layout``: of the bytes
    (``PageBytes.layout``). ``numerics``: what rounds: device, kernels, dtype and number format of
    the weights. ``page_bytes``: of a page of each space; a stored page of another size is refused.
    """

    model: str
    weights_digest: str
    weights_version: str
    kv_dtype: str
    page_size: int
    groups: tuple[PageGroup, ...] = ()
    quantization: str = ""
    layout: str = ""
    numerics: str = ""
    rectangle: Rectangle = Rectangle()
    page_bytes: tuple[int, int] = (0, 0)
    format: int = FORMAT

    @property
    def digest(self) -> bytes:
        """SHA-256 over what the numbers of a page mean; equal for all ranks and layouts."""
        return _digest(
            self.format,
            self.model,
            self.weights_digest,
            self.weights_version,
            self.kv_dtype,
            self.page_size,
            self.groups,
            self.quantization,
        )

    @property
    def storage_digest(self) -> bytes:
        """SHA-256 over ``digest``, the layout, what rounds, and the rank's part."""
        return _digest(self.digest, self.layout, self.numerics, self.rectangle, self.page_bytes)

    def tensors(self, space: int) -> tuple[PageTensor, ...]:
        """What the bytes of a page of the space are."""
        return page_tensors(self.layout, space)

    def differences(self, other: Manifest) -> list[str]:
        """The fields of ``digest`` in which two manifests differ, with both values."""
        names = ("format", "model", "weights_digest", "weights_version", "kv_dtype", "page_size")
        pairs = {
            n: (getattr(self, n), getattr(other, n)) for n in (*names, "groups", "quantization")
        }
        return [
            f"{name}: {mine} and {theirs}"
            for name, (mine, theirs) in pairs.items()
            if mine != theirs
        ]


def _digest(*fields: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(fields, order="deterministic")).digest()


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder, or the one file, by name."""
    found = folder.iterdir() if folder.is_dir() else iter([folder])
    return sorted(path for path in found if path.suffix in _WEIGHT_SUFFIXES or path == folder)


def weights_digest(folder: Path, files: Iterable[Path] | None = None) -> str:
    """A digest of a checkpoint, hex: for each file of weights its name, its size, its first and
    last 64 KB, which have names and shapes of the tensors, and 4 KB of each MB between, as
    checkpoints of one shape may differ in a few layers only."""
    hasher = hashlib.sha256()
    for path in weight_files(folder) if files is None else sorted(files):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            hasher.update(f"{path.name} {size} ".encode())
            last = max(0, size - _END_BYTES)
            for start in (0, *range(_END_BYTES, last, _SAMPLE_EVERY), last):
                file.seek(start)
                hasher.update(file.read(_END_BYTES if start in (0, last) else _SAMPLE_BYTES))
    return hasher.hexdigest()
