"""The tensors of a GGUF file under our names, as floats: F32, F16, BF16 and F64 as they are, blocks
of 4, 5, 6 and 8 bits widened.

Legend: N blocks of a tensor. Blocks of 32 numbers: a scale d in 16 bits (and a least value m in the
formats "_1"), then the numbers (https://github.com/ggml-org/ggml, ggml-common.h).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from radixlm.arch.families.gguf import Piece, pieces
from radixlm.arch.gguf import TYPES, GgufTensor, read_header
from radixlm.base.errors import CheckpointError

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BLOCK_BYTES = {name: (block, size) for name, block, size in TYPES.values()}


def _half(bytes_N2: Tensor) -> Tensor:
    return bytes_N2.contiguous().view(torch.float16).float()  # [N, 1]


def _nibbles(bytes_N16: Tensor) -> Tensor:
    return torch.cat((bytes_N16 & 15, bytes_N16 >> 4), -1).float()  # low halves first


def _fifth_bits(bytes_N4: Tensor) -> Tensor:
    bits = (bytes_N4[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2).float() * 16


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].view(torch.int8)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]) - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]) + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 6:]) + _fifth_bits(b[:, 2:6]) - 16)


def _q5_1(b: Tensor) -> Tensor:
    values = _nibbles(b[:, 8:]) + _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * values + _half(b[:, 2:4])


def _q6_k(b: Tensor) -> Tensor:
    """Two halves of 128 numbers: 64 bytes of low nibbles, 32 of upper pairs of bits; a signed
    byte of scale for each 16 numbers, then d."""
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    nibbles = torch.cat((low & 15, low >> 4), 2)  # [N, 2, 4, 32]
    pairs = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    values = (nibbles.float() + pairs.float() * 16 - 32).reshape(-1, 16, 16)
    return (_half(b[:, 208:])[..., None] * scales[..., None] * values).flatten(1)


_WIDEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q6_K": _q6_k,
}  # fmt: skip


class GgufSource:
    """All tensors of one file; see TensorSource."""

    def __init__(self, file: Path) -> None:
        """CheckpointError for a broken file, an unknown architecture, or weights of a kind that is
        not read."""
        header = read_header(file)
        for name, tensor in header.tensors.items():
            if tensor.kind not in _PLAIN and tensor.kind not in _WIDEN:
                known = ", ".join((*_PLAIN, *_WIDEN))
                raise CheckpointError(f"{file}: {name} is {tensor.kind}; read are: {known}")
        self._file, self._tensors = file, header.tensors
        self._pieces: dict[str, Piece] = {}
        for name, piece in pieces(header):
            if name in self._pieces:
                raise CheckpointError(f"{file}: {piece.source} and another are both {name}")
            self._pieces[name] = piece
        with file.open("rb") as opened:
            # private and writable only because torch warns of read-only buffers
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored."""
        return {name: end - start for name in self._pieces for start, end in (self._span(name),)}

    def read(self, name: str) -> Tensor:
        """The tensor as floats: 16 bits where the file has 16, else float32."""
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        shape = tensor.shape if piece.expert is None else tensor.shape[1:]
        value = self._values(tensor, *self._span(name)).view(shape)
        if piece.heads:
            value = _halves(value, piece)
        if piece.offset:
            value = value.float() - piece.offset
        if name.endswith("shared_expert_gate.weight") and value.ndim == 1:
            value = value[None]  # llama.cpp drops the row of one
        return value

    def release(self, name: str) -> None:
        """The pages of the file may go."""
        start, end = self._span(name)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def _span(self, name: str) -> tuple[int, int]:
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        if piece.expert is None:
            return tensor.start, tensor.end
        size = (tensor.end - tensor.start) // tensor.shape[0]
        return tensor.start + piece.expert * size, tensor.start + (piece.expert + 1) * size

    def _values(self, tensor: GgufTensor, start: int, end: int) -> Tensor:
        if end == start:
            return torch.empty(0)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=start)
        if tensor.kind in _PLAIN:
            return _aligned(data, start).view(_PLAIN[tensor.kind])
        _, size = _BLOCK_BYTES[tensor.kind]
        return _WIDEN[tensor.kind](data.view(-1, size))


def _aligned(data: Tensor, start: int) -> Tensor:
    return data.clone() if start % 8 else data


def _halves(value: Tensor, piece: Piece) -> Tensor:
    """Rows of each head in the order of Hugging Face: first the one half of the pairs."""
    if value.shape[0] % (2 * piece.heads):
        raise ValueError(f"{value.shape[0]} rows are no pairs of {piece.heads} heads")
    rows = value.reshape(piece.heads, -1, 2, math.prod(value.shape[1:]))
    return rows.transpose(1, 2).reshape(value.shape)
