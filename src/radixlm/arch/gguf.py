"""GGUF files: the header (metadata and where tensors lie), and the config.json it stands for.

Format: "GGUF", u32 version, u64 tensors, u64 pairs of metadata, the pairs, a record a tensor, then
the data at the next multiple of general.alignment; all little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Nothing in it is believed: counts and
lengths are held against the bytes that are left.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import DOWNLOAD_AGAIN, CheckpointError
from radixlm.base.record import Record

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_ROW = 4096
MAX_DEPTH = 2  # of arrays of arrays
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# number of a metadata type -> its struct code
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# number of a tensor type -> name, numbers a block, bytes a block
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

# kinds of 4 bits that layers keep: integers with a scale and an offset for each 32 numbers, and
# floats with a scale for each 32 or 16
FP4 = ("MXFP4", "NVFP4")
GRIDS = ("Q4_0", "Q4_1", "Q4_K", *FP4)


class GgufTensor(Record):
    """Where a tensor lies in which file; ``shape`` as in torch, rows first."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class GgufHeader(Record):
    """The metadata by key, the tensors by name. ``path``: the file, of several parts the first,
    which has the metadata."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    files: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return str(self.metadata.get("general.architecture"))

    def own(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; CheckpointError if it is none. Of equal ones a layer, the one."""
        value = self.own(key, default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            name = f"{self.architecture}.{key}"
            raise CheckpointError(f"{self.path}: {name} = {value!r:.60} must be a positive integer")
        return value


def read_header(path: Path) -> GgufHeader:
    """Of a file, and of the other parts where it is one of several. CheckpointError for one that is
    missing, truncated, malformed, of an unknown version or of another model."""
    paths = parts_of(path)
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{path}: missing files: {', '.join(missing[:3])}{more}")
    headers = [_read_file(part) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        place = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1) or 1
        if place != (number, len(paths)):
            raise CheckpointError(
                f"{header.path}: has split.no {place[0]!r:.20} of {place[1]!r:.20}, by its name it "
                f"is {number} of {len(paths)}"
            )
        if twice := tensors.keys() & header.tensors.keys():
            name = min(twice)
            other = tensors[name].file.name
            raise CheckpointError(f"{header.path}: {name} is also in another part, {other}")
        tensors |= header.tensors
    first = headers[0]
    promised = first.metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(
            f"{first.path}: split.tensors.count is {promised!r:.20}, the parts hold {len(tensors)}"
        )
    return GgufHeader(first.path, first.metadata, tensors, tuple(paths))


def parts_of(path: Path) -> list[Path]:
    """The names of all parts of which a file is one, by its own name: "m-00002-of-00003.gguf"."""
    part = _PART.search(path.name)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    return [path.with_name(f"{stem}-{n:05d}-of-{part[2]}.gguf") for n in range(1, count + 1)]


def first_parts(files: Sequence[Path]) -> list[Path]:
    """Of each model in ``files`` the file, or the first of its parts. Encoders of media
    ("mmproj-...") are none."""
    models = (file for file in sorted(files) if not file.name.lower().startswith("mmproj"))
    return list(dict.fromkeys(parts_of(file)[0] for file in models))


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as opened:
            size = path.stat().st_size
            if size < 24:
                raise CheckpointError(
                    f"{path}: truncated: {size} bytes are no GGUF file{DOWNLOAD_AGAIN}"
                )
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_row(header: GgufHeader, name: str) -> list[float]:
    """The numbers of a short row of F32; CheckpointError if it is something else."""
    tensor = header.tensors[name]
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROW:
        raise CheckpointError(f"{header.path}: {name} must be a row of F32")
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.end - tensor.start)))


class _Reader:
    """Walks the header once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._error("no GGUF file (its first bytes are others)")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is unknown; known: 2, 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._check_count(num_pairs, 13, "pairs of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), MAX_DEPTH)
        self._check_count(num_tensors, 24, "tensors")
        records = [self._record() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._error(f"general.alignment = {alignment!r:.40} is none")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in records:
            if name in tensors:
                raise self._error(f"{name} is there twice")
            tensors[name] = self._tensor(name, kind, shape, base + offset)
        return GgufHeader(self._path, metadata, tensors, (self._path,))

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        if kind not in TYPES:
            known = ", ".join(label for label, _, _ in TYPES.values())
            raise self._error(f"{name} is of type {kind}; read are: {known}")
        label, block, block_bytes = TYPES[kind]
        if shape and shape[-1] % block:
            raise self._error(f"{name}: rows of {shape[-1]} are no blocks of {block} ({label})")
        end = start + math.prod(shape) // block * block_bytes
        if end > len(self._data):
            raise self._error(
                f"truncated: {name} ends at byte {end}, the file has {len(self._data)}"
                f"{DOWNLOAD_AGAIN}"
            )
        return GgufTensor(self._path, label, shape, start, end)

    def _record(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dims = self._string(), self._scalar("I")
        if num_dims > MAX_DIMS:
            raise self._error(f"{name} has {num_dims} dimensions")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        kind, offset = self._scalar("I"), self._scalar("Q")
        return name, kind, dims[::-1], offset

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or not depth:
            raise self._error(f"metadata of the unknown type {kind}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            self._check_count(count, struct.calcsize(code), "numbers of an array")
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
        self._check_count(count, 8, "entries of an array")
        return [self._value(inner, depth - 1) for _ in range(count)]

    def _string(self) -> str:
        length = self._scalar("Q")
        self._check_count(length, 1, "bytes of a text")
        return self._take(length).decode("utf-8", "replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._error(
                f"truncated: the header ends after byte {len(self._data)}{DOWNLOAD_AGAIN}"
            )
        piece, self._at = self._data[self._at : end], end
        return piece

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > len(self._data) - self._at:
            raise self._error(f"{count} {what} do not fit the file of {len(self._data)} bytes")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")
