"""Tensors as bytes, without torch: the layout of a safetensors file, and typed handles.

A safetensors file is 8 bytes little-endian header size, a JSON header {name: {dtype, shape,
data_offsets}}, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from radixlm.base.record import Record

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
# names of torch -> names of the format
CODES = {
    **dict.fromkeys(("float64", "double"), "F64"),
    **dict.fromkeys(("float32", "float"), "F32"),
    **dict.fromkeys(("float16", "half"), "F16"),
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}
ITEM_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "IU" for bits in (8, 16, 32, 64)},
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "BOOL": 1,
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}
FLAT_TENSOR = "flattened_tensor"  # of SGLang's flattened bucket, beside "metadata"


class TensorInfo(Record):
    """One tensor of a file. ``dtype``: a code of the format; ``start``: bytes from the beginning
    of the file, 0 where it is not known yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def dtype_code(name: Any) -> str:
    """The format's code of a dtype: "bfloat16", "torch.bfloat16", "BF16" or a torch.dtype.
    ValueError for others."""
    text = str(name).removeprefix("torch.")
    code = CODES.get(text, text)
    if code not in ITEM_BYTES:
        raise ValueError(f"the dtype {text!r:.40} is none of {', '.join(CODES)}")
    return code


def tensor_info(name: Any, dtype: Any, shape: Any) -> TensorInfo:
    """Checked parts of a description that came in a request; ValueError."""
    if not isinstance(name, str) or not 0 < len(name) <= 4096 or name == "__metadata__":
        raise ValueError(f"{name!r:.80} is no name of a tensor")
    is_shape = isinstance(shape, list | tuple) and len(shape) <= 16
    if not is_shape or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name}: {shape!r:.80} is no shape, such as [4096, 1024]")
    try:
        return TensorInfo(name, dtype_code(dtype), tuple(shape))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def make_header(tensors: Iterable[TensorInfo]) -> bytes:
    """The head of a file in which the data of ``tensors`` follows in this order; its length is a
    multiple of 8. ValueError if two have one name."""
    entries: dict[str, Any] = {}
    at = 0
    for one in tensors:
        if one.name in entries:
            raise ValueError(f"two tensors are called {one.name}")
        ends = [at, at := at + one.num_bytes]
        entries[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": ends}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of a file by name, and the texts of its metadata; ValueError if it is truncated
    or malformed. Overlapping tensors are left to the reader of the weights."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        num_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + num_bytes > size or num_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"truncated, or no safetensors file ({size} bytes)")
        try:
            header = json.loads(opened.read(num_bytes))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    metadata, base = header.pop("__metadata__", None) or {}, 8 + num_bytes
    return {name: _entry(name, found, base, size) for name, found in header.items()}, metadata


def _entry(name: str, found: Any, base: int, size: int) -> TensorInfo:
    match found:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            one = tensor_info(name, code, shape)
        case _:
            raise ValueError(f"malformed entry of {name!r:.80}")
    if start < 0 or end - start != one.num_bytes:
        raise ValueError(f"{name}: {end - start} bytes do not make {code} {shape}")
    if base + end > size:
        raise ValueError(f"truncated: {name} ends at byte {base + end} of {size}")
    return TensorInfo(one.name, one.dtype, one.shape, base + start)


def split_bucket(flat: TensorInfo, metadata: Any) -> list[TensorInfo]:
    """The tensors of SGLang's flattened bucket, in the order of their bytes. ``metadata``: a list
    of {name, shape, dtype, start_idx, end_idx}, in elements of ``flat``. ValueError if they are
    not views of it that lie one behind the other."""
    if not isinstance(metadata, list) or not metadata:
        raise ValueError("metadata: give a list of {name, shape, dtype, start_idx, end_idx}")
    item, at, found = ITEM_BYTES[flat.dtype], 0, []
    for place in sorted(metadata, key=lambda one: _start_of(one)):
        one = tensor_info(place.get("name"), place.get("dtype"), place.get("shape"))
        start, end = place["start_idx"] * item, place.get("end_idx", -1)
        if type(end) is not int or end * item - start != one.num_bytes or start != at:
            raise ValueError(
                f"{one.name}: elements {place['start_idx']} to {end} of a bucket in {flat.dtype} "
                f"are not a tensor {one.dtype} {list(one.shape)} behind the one before; flatten "
                "views of uint8, one behind the other"
            )
        found.append(TensorInfo(one.name, one.dtype, one.shape, flat.start + start))
        at = end * item
    if at != flat.num_bytes:
        raise ValueError(f"the bucket has {flat.num_bytes} bytes, its tensors {at}")
    return found


def _start_of(place: Any) -> int:
    start = place.get("start_idx") if isinstance(place, dict) else None
    if type(start) is not int or start < 0:
        raise ValueError("metadata: each entry needs a start_idx, such as 0")
    return start
