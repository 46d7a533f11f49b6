"""Vectors as base64 and as bytes, in the number formats of vLLM."""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson
from fastapi.responses import Response
from numpy.typing import NDArray

NumberFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder = Literal["native", "little", "big"]
Vector = Sequence[float] | Sequence[Sequence[float]]


def packed(vector: Vector, numbers: NumberFormat = "float32", order: ByteOrder = "native") -> str:
    """The base64 of a vector's numbers; ``native`` is little-endian, whatever the machine."""
    return base64.b64encode(_bytes(vector, numbers, order)).decode()


def bytes_response(
    answer: dict[str, Any], name: str, numbers: NumberFormat, order: ByteOrder, has_metadata: bool
) -> Response:
    """The numbers of all vectors, field ``name`` of ``answer["data"]``, and the answer without them
    as JSON in the header ``metadata``: of each its place, from ``start`` to ``end`` in bytes."""
    parts, items, start = [], [], 0
    for row in answer["data"]:
        part = _bytes(row[name], numbers, order)
        end, shape = start + len(part), np.shape(row[name])
        items.append({"index": row["index"], "embed_dtype": numbers, "endianness": order,
                      "start": start, "end": end, "shape": shape})  # fmt: skip
        parts.append(part)
        start = end
    names = ("id", "created", "model", "usage")
    metadata = orjson.dumps({key: answer[key] for key in names} | {"data": items})
    headers = {"metadata": metadata.decode("latin-1")} if has_metadata else None
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")


def _bytes(vector: Vector, numbers: NumberFormat, order: ByteOrder) -> bytes:
    if numbers == "bfloat16":
        bits = np.asarray(vector, np.float32).view(np.uint32).astype(np.uint64)
        halves = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        made = halves.astype(np.uint16)  # rounded to nearest, ties to even
    elif numbers in _FP8:
        return _fp8(np.asarray(vector, np.float32), *_FP8[numbers]).tobytes()
    else:
        made = np.asarray(vector, numbers)
    return made.astype(made.dtype.newbyteorder(_SIGNS[order])).tobytes()


def _fp8(values: NDArray[np.float32], mantissa: int, largest: int) -> NDArray[np.uint8]:
    """Rounded to nearest, ties to even; beyond the code ``largest`` to it."""
    codes = np.arange(largest + 1)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (6 - mantissa)) - 1
    numbers = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    middles, sizes = (numbers[1:] + numbers[:-1]) / 2, np.abs(values.astype(np.float64))
    found = np.searchsorted(middles, sizes)
    is_tie = (found < largest) & (sizes == middles[np.minimum(found, largest - 1)])
    rounded = found + (is_tie & (found % 2 == 1)) + 128 * np.signbit(values)
    return np.asarray(rounded, np.uint8)


# bits of the mantissa, and the code of the largest number (e4m3) or of infinity (e5m2), as by torch
_FP8 = {"fp8_e4m3": (3, 0x7E), "fp8_e5m2": (2, 0x7C)}
_SIGNS: dict[ByteOrder, Literal["<", ">"]] = {"native": "<", "little": "<", "big": ">"}
