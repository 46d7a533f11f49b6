"""The tensors of a GGUF file under our names, as floats: F32, F16, BF16 and F64 as they are, blocks
of fewer bits widened."""

from __future__ import annotations

import logging
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from radixlm.arch.families.gguf import Piece, pieces
from radixlm.arch.gguf import GRIDS, TYPES, GgufTensor, read_header
from radixlm.base.errors import CheckpointError
from radixlm.quant.grid import Grid
from radixlm.weights.gguf_blocks import WIDEN, grid_parts, widen

log = logging.getLogger(__name__)
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BLOCKS = {name: (block, size) for name, block, size in TYPES.values()}


class GgufSource:
    """All tensors of one file; see TensorSource."""

    def __init__(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """Blocks are widened to ``dtype``. CheckpointError for a broken file, an unknown
        architecture, or weights of a kind that is not read."""
        header = read_header(file)
        for name, tensor in header.tensors.items():
            if tensor.kind not in _PLAIN and tensor.kind not in WIDEN:
                known = ", ".join((*_PLAIN, *WIDEN))
                raise CheckpointError(f"{file}: {name} is {tensor.kind}; read are: {known}")
        self._dtype, self._tensors = dtype, header.tensors
        self._pieces: dict[str, Piece] = {}
        for name, piece in pieces(header):
            if name in self._pieces:
                raise CheckpointError(f"{file}: {piece.source} and another are both {name}")
            self._pieces[name] = piece
        with file.open("rb") as opened:
            # private and writable only because torch warns of read-only buffers
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        log.info("%s: %s", file.resolve().name, self._said())

    def _said(self) -> str:
        """How many tensors of which kind there are, and what becomes of them."""
        counts = Counter(tensor.kind for tensor in self._tensors.values())
        widened = [f"{kind} x {counts[kind]}" for kind in WIDEN if kind in counts]
        kept = [f"{kind} x {counts[kind]}" for kind in _PLAIN if kind in counts]
        dtype = str(self._dtype).removeprefix("torch.")
        said = [f"{', '.join(kept)} as they are"] if kept else []
        if widened:
            kept_too = " where a layer cannot keep 4 bits" if counts.keys() & set(GRIDS) else ""
            said.append(f"{', '.join(widened)} widened to {dtype}{kept_too}")
        return "; ".join(said)

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored."""
        return {name: end - start for name in self._pieces for start, end in (self._span(name),)}

    def read(self, name: str) -> Tensor:
        """The tensor as floats; blocks in the dtype that they are widened to."""
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

    def has_grid(self, name: str) -> bool:
        """Whether ``grid`` gives a tensor."""
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        is_matrix = len(tensor.shape) == 2 and all(tensor.shape)
        return tensor.kind in GRIDS and is_matrix and not piece.offset

    def grid(self, name: str) -> Grid:
        """A matrix of 4 bits with its scales and offsets, as it is stored."""
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        blocks = self._bytes(*self._span(name)).view(-1, _BLOCKS[tensor.kind][1])
        parts = [part.view(tensor.shape[0], -1) for part in grid_parts(tensor.kind, blocks)]
        return Grid(*(_halves(part, piece) if piece.heads else part for part in parts))

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
        data = self._bytes(start, end)
        if tensor.kind in _PLAIN:
            return _aligned(data, start).view(_PLAIN[tensor.kind])
        block, size = _BLOCKS[tensor.kind]
        return widen(tensor.kind, data.view(-1, size), block, self._dtype)

    def _bytes(self, start: int, end: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=start)


def _aligned(data: Tensor, start: int) -> Tensor:
    return data.clone() if start % 8 else data


def _halves(value: Tensor, piece: Piece) -> Tensor:
    """Rows of each head in the order of Hugging Face: first the one half of the pairs."""
    if value.shape[0] % (2 * piece.heads):
        raise ValueError(f"{value.shape[0]} rows are no pairs of {piece.heads} heads")
    rows = value.reshape(piece.heads, -1, 2, math.prod(value.shape[1:]))
    return rows.transpose(1, 2).reshape(value.shape)
