"""One tensor of a file that ``torch.save`` has written, read without torch and without unpickling:
the few opcodes that describe a tensor are interpreted here, all others are refused."""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1",
    "ByteStorage": "<u1", "BoolStorage": "?",
}  # fmt: skip
_TENSOR = "torch._utils _rebuild_tensor_v2"
_MAX_PICKLE_BYTES = 1 << 16
_VALUES = frozenset("BINUNICODE SHORT_BINUNICODE BININT BININT1 BININT2 LONG1 GLOBAL".split())
_MARK = object()
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
# BINPERSID: the tuple that names a storage stands for it
_IDLE = ("PROTO", "BINPERSID", "STOP")


def read_tensor(raw: bytes, max_bytes: int) -> NDArray[Any]:
    """The tensor, bfloat16 as float32. ValueError for a file that holds anything else, or more
    than ``max_bytes``."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as file:
            names = {name.partition("/")[2]: name for name in file.namelist()}
            entries = {one.filename: one for one in file.infolist()}
            if sum(one.file_size for one in entries.values()) > max_bytes:
                raise ValueError(f"more than {max_bytes >> 20} MiB")
            if entries[names["data.pkl"]].file_size > _MAX_PICKLE_BYTES:
                raise ValueError("more than one tensor")
            if "byteorder" in names and file.read(names["byteorder"]) != b"little":
                raise ValueError("its numbers are big-endian")
            storage, offset, shape, strides = _described(file.read(names["data.pkl"]))
            kind, key = storage[1].partition(" ")[2], storage[2]
            numbers = np.frombuffer(file.read(names[f"data/{key}"]), _STORAGES[kind])
    except (KeyError, IndexError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a file of one tensor ({error!r:.80})") from None
    if kind == "BFloat16Storage":  # the upper half of a float32
        numbers = (numbers.astype("<u4") << 16).view("<f4")
    return _view(numbers, offset, shape, strides)


def _view(numbers: NDArray[Any], offset: int, shape: Any, strides: Any) -> NDArray[Any]:
    sizes = [*shape, *strides, offset]
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError("its shape is none")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= len(numbers):
        raise ValueError("its numbers are not all there")
    if math.prod(shape) > len(numbers):
        raise ValueError("it is expanded: save a contiguous tensor")
    steps = [step * numbers.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)


def _described(data: bytes) -> tuple[Any, int, Any, Any]:
    """(storage, offset, shape, strides), as the pickle tells them."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            at = len(stack) - 1 - stack[::-1].index(_MARK)
            stack[at:] = [tuple(stack[at + 1 :])]
        elif name == "REDUCE":
            stack[-2:] = [(stack[-2], stack[-1])]
        elif name not in _IDLE:
            raise ValueError(f"its pickle has {name}: only one plain tensor is read")
    function, arguments = stack.pop()
    if function != _TENSOR or arguments[0][0] != "storage":
        raise ValueError(f"it holds {function!r:.60}, not a plain tensor: save tensor.detach()")
    storage, offset, shape, strides = arguments[:4]
    return storage, offset, shape, strides
