"""Vectors as base64, in the number formats of vLLM."""

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np

NumberFormat = Literal["float32", "float16", "bfloat16"]
ByteOrder = Literal["native", "little", "big"]


def packed(
    vector: Sequence[float], numbers: NumberFormat = "float32", order: ByteOrder = "native"
) -> str:
    """The base64 of a vector's numbers; ``native`` is little-endian, whatever the machine."""
    if numbers == "bfloat16":
        bits = np.asarray(vector, np.float32).view(np.uint32).astype(np.uint64)
        halves = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        made = halves.astype(np.uint16)  # rounded to nearest, ties to even
    else:
        made = np.asarray(vector, numbers)
    return base64.b64encode(made.astype(made.dtype.newbyteorder(_SIGNS[order])).tobytes()).decode()


_SIGNS: dict[ByteOrder, Literal["<", ">"]] = {"native": "<", "little": "<", "big": ">"}
