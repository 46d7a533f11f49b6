"""Safetensors files, memory-mapped: pages are loaded as a tensor is read, and dropped when it is
released.

Floats of 4 bits are read as the bytes that hold two of them.

Format: 8 bytes little-endian header size, a JSON header {name: {dtype, shape, data_offsets}},
then the data (https://github.com/huggingface/safetensors).
"""

import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import DOWNLOAD_AGAIN, CheckpointError
from radixlm.base.record import Record
from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource, read_weight_map

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MAX_NUMBERS = 1 << 60  # of a tensor, and of an empty one without its zeros: torch counts in int64


class Entry(Record):
    """Where a tensor is stored; ``start`` and ``end`` are bytes from the beginning of the file."""

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsSource(TensorSource):
    """All tensors of some safetensors files."""

    def __init__(self, files: Sequence[Path], index: Path | None = None) -> None:
        """``index``: of the checkpoint, read where two files have a tensor of one name: it says
        which is meant. CheckpointError where it does not, and for damaged files."""
        homes: Mapping[str, str] = {}
        self._files = tuple(files)
        self._maps: list[mmap.mmap] = []
        self._entries: dict[str, Entry] = {}
        for number, file in enumerate(files):
            entries = read_header(file, number)
            duplicates = sorted(self._entries.keys() & entries.keys())
            if duplicates and index is not None:
                homes = homes or read_weight_map(index)
            for name in duplicates:
                other = self._files[self._entries[name].file].name
                if homes.get(name) not in (file.name, other):
                    raise CheckpointError(f"{file}: {name} is also in another file, {other}")
                if homes[name] == other:
                    del entries[name]
            self._entries.update(entries)
            with file.open("rb") as opened:
                # Private and writable only because torch warns of read-only buffers.
                self._maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))

    def sizes(self) -> Mapping[str, int]:
        return {name: entry.end - entry.start for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = torch.frombuffer(
            self._maps[entry.file], dtype=entry.dtype, count=count, offset=entry.start
        )
        return data.view(entry.shape)

    def release(self, name: str) -> None:
        entry = self._entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, length)

    def origins(self, name: str) -> Sequence[Origin]:
        return [Origin(self._files[self._entries[name].file], name, lambda: self.read(name))]

    def files(self) -> Sequence[Path]:
        return self._files


def read_header(file: Path, number: int = 0) -> dict[str, Entry]:
    """The entries of one file; CheckpointError if it is truncated or malformed."""
    return parse_header(file, number, *_header_of(file))


def read_metadata(file: Path) -> dict[str, str]:
    """The texts that the writer of a file that ``read_header`` has checked added to it."""
    found = json.loads(_header_of(file)[0]).get("__metadata__")
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _header_of(file: Path) -> tuple[bytes, int]:
    """(the JSON header, bytes of the file)."""
    try:
        file_size = file.stat().st_size
        with file.open("rb") as opened:
            return opened.read(header_bytes(file, opened.read(8), file_size)), file_size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def header_bytes(file: Path, prefix: bytes, file_size: int) -> int:
    """The length of the JSON header, by the first 8 bytes; CheckpointError if it cannot be."""
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: truncated: {file_size} bytes are no header{DOWNLOAD_AGAIN}")
    (header_size,) = struct.unpack("<Q", prefix)
    if header_size > min(file_size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: truncated or no safetensors file: the header says {header_size} "
            f"bytes, the file has {file_size}{DOWNLOAD_AGAIN}"
        )
    return int(header_size)


def parse_header(file: Path, number: int, data: bytes, file_size: int) -> dict[str, Entry]:
    """The entries of one file by its JSON header; CheckpointError if they are malformed."""
    try:
        header = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is no JSON object")
    header.pop("__metadata__", None)
    base = 8 + len(data)
    entries = {name: _entry(file, number, name, e, base, file_size) for name, e in header.items()}
    _check_overlap(file, entries)
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object; ValueError if a name is there twice, which the format forbids."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise ValueError(f"{twice} is there twice")
    return found


def _check_overlap(file: Path, entries: Mapping[str, Entry]) -> None:
    """CheckpointError if two tensors share bytes."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    for (one, first), (other, second) in pairwise(ordered):
        if first.end > second.start:
            raise CheckpointError(f"{file}: {one} and {other} lie in the same bytes")


def _entry(file: Path, number: int, name: str, record: object, base: int, file_size: int) -> Entry:
    match record:
        case {
            "dtype": "F4", "shape": [*rows, int(width)], "data_offsets": [int(start), int(end)]
        } if width % 2 == 0:  # fmt: skip
            dtype, shape = "I8", [*rows, width // 2]
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{file}: malformed entry for {name}: {record!r}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!r}")
    is_valid = all(type(n) is int and n >= 0 for n in shape) and start >= 0
    if not is_valid or math.prod(max(n, 1) for n in shape) > _MAX_NUMBERS:
        raise CheckpointError(f"{file}: malformed entry for {name}: {record!r}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{file}: {name}: {end - start} bytes do not make {dtype} {shape}")
    if base + end > file_size:
        raise CheckpointError(
            f"{file}: truncated: {name} ends at byte {base + end}, the file has {file_size}"
            f"{DOWNLOAD_AGAIN}"
        )
    return Entry(number, DTYPES[dtype], tuple(shape), base + start, base + end)
