"""The tensors of a GGUF file, or of its parts, under Hugging Face's names, as floats; quantized
blocks are dequantized."""

import logging
import mmap
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.arch.families.gguf import Piece, pieces
from radixlm.arch.gguf import FP4, GRIDS, TYPES, GgufTensor, read_header
from radixlm.base.errors import CheckpointError
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.gguf_blocks import DEQUANTIZE, dequantize, quantized_parts
from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BLOCKS = {name: (block, size) for name, block, size in TYPES.values()}


class GgufSource(TensorSource):
    """All tensors of one file and of its further parts."""

    def __init__(
        self, file: Path, dtype: torch.dtype = torch.float32, keeps_quantized: bool = True
    ) -> None:
        """Blocks are dequantized to ``dtype``; without ``keeps_quantized`` a layer cannot get them
        as they are stored. CheckpointError for a broken file or an unknown architecture."""
        file = _user_file(file)
        header = read_header(file)
        self._files = header.files
        self._dtype, self._keeps_quantized = dtype, keeps_quantized
        self._tensors = header.tensors
        self._pieces: dict[str, Piece] = {}
        for name, piece in pieces(header):
            if name in self._pieces:
                where = header.tensors[piece.source].file
                raise CheckpointError(f"{where}: {piece.source} and another are both {name}")
            self._pieces[name] = piece
        self._maps: dict[Path, mmap.mmap] = {}
        for part in header.files:
            with part.open("rb") as opened:
                # private and writable only because torch warns of read-only buffers
                self._maps[part] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        log.info("%s: %s", file.name, self._summary())

    def _summary(self) -> str:
        """How many tensors there are of each type, and whether they are dequantized."""
        counts = Counter(tensor.kind for tensor in self._tensors.values())
        blocks = [f"{kind} x {counts[kind]}" for kind in DEQUANTIZE if kind in counts]
        floats = [f"{kind} x {counts[kind]}" for kind in _PLAIN if kind in counts]
        dtype = str(self._dtype).removeprefix("torch.")
        parts = [f"{', '.join(floats)} as they are"] if floats else []
        if blocks:
            unless = " unless a layer keeps 4 bits" if counts.keys() & set(GRIDS) else ""
            parts.append(f"{', '.join(blocks)} dequantized to {dtype}{unless}")
        return "; ".join(parts)

    def sizes(self) -> Mapping[str, int]:
        return {name: end - start for name in self._pieces for start, end in (self._span(name),)}

    def read(self, name: str) -> Tensor:
        """The tensor as floats, in the row order of Hugging Face."""
        piece, value = self._pieces[name], self._stored(name)
        if piece.other is not None:
            other, join = piece.other
            value = join(value, self._whole(other))
        if piece.rows is not None:
            value = piece.rows(value)
        if piece.offset:
            value = value.float() - piece.offset
        if piece.change is not None:
            value = piece.change(value)
        if name.endswith("shared_expert_gate.weight") and value.ndim == 1:
            value = value[None]  # llama.cpp drops the row of one
        return value

    def _stored(self, name: str) -> Tensor:
        """The tensor in the row order of the file."""
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        shape = tensor.shape if piece.expert is None else tensor.shape[1:]
        return self._values(tensor, *self._span(name)).view(shape)

    def _whole(self, source: str) -> Tensor:
        """A tensor under the file's name."""
        tensor = self._tensors.get(source)
        if tensor is None:
            raise CheckpointError(f"{self._files[0]}: {source} is missing")
        return self._values(tensor, tensor.start, tensor.end).view(tensor.shape)

    def is_quantized(self, name: str) -> bool:
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        is_matrix = len(tensor.shape) == 2 + (piece.expert is not None) and all(tensor.shape)
        is_kept = not piece.offset and piece.change is None and piece.other is None
        return tensor.kind in GRIDS and is_matrix and is_kept

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A matrix of 4 bits with its scales and offsets."""
        if not self._keeps_quantized:
            return None
        piece = self._pieces[name]
        tensor = self._tensors[piece.source]
        blocks = self._bytes(tensor, *self._span(name)).view(-1, _BLOCKS[tensor.kind][1])
        parts = [part.view(tensor.shape[-2], -1) for part in quantized_parts(tensor.kind, blocks)]
        values, scale, offset = (t if piece.rows is None else piece.rows(t) for t in parts)
        return QuantizedWeight(values, scale, offset, is_fp4=tensor.kind in FP4)

    def release(self, name: str) -> None:
        """The pages of the file may be evicted."""
        start, end = self._span(name)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            file = self._tensors[self._pieces[name].source].file
            self._maps[file].madvise(mmap.MADV_DONTNEED, first, length)

    def origins(self, name: str) -> Sequence[Origin]:
        source = self._pieces[name].source
        return [Origin(self._tensors[source].file, source, lambda: self._stored(name))]

    def files(self) -> Sequence[Path]:
        return self._files

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
        data = self._bytes(tensor, start, end)
        if tensor.kind in _PLAIN:
            return _aligned(data, start).view(_PLAIN[tensor.kind])
        block, size = _BLOCKS[tensor.kind]
        return dequantize(tensor.kind, data.view(-1, size), block, self._dtype)

    def _bytes(self, tensor: GgufTensor, start: int, end: int) -> Tensor:
        data = self._maps[tensor.file]
        return torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start)


def _user_file(file: Path) -> Path:
    """The target of a link of ``engine/gguf.py``: messages name the user's own file, which its
    further parts lie beside. Other links may lead to files with meaningless names."""
    target = Path(os.readlink(file)) if file.is_symlink() else file
    return target if target.is_absolute() else file


def _aligned(data: Tensor, start: int) -> Tensor:
    return data.clone() if start % 8 else data
