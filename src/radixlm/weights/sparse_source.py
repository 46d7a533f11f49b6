"""Sparse weights of compressed-tensors, read as dense ones: X.compressed has the values whose bits
are set in X.bitmask (uint8 [O, ceil(I / 8)], the lowest bit first), X.shape says [O, I]."""

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.weights.parts_source import PartsSource, find_parts
from radixlm.weights.source import TensorSource

_PARTS = ("compressed", "bitmask", "shape", "row_offsets")


class SparseSource(PartsSource):
    """``inner`` with dense weights in the dtype of their values."""

    def __init__(self, inner: TensorSource, quant: Record, dtype: torch.dtype) -> None:
        parts = find_parts(inner, _PARTS)
        parts = {name: found for name, found in parts.items() if "compressed" in found}
        super().__init__(inner, parts, dtype)

    def read(self, name: str) -> Tensor:
        return self.weight(name) if name in self._parts else self.inner.read(name)

    def is_quantized(self, name: str) -> bool:
        return False

    def weight(self, name: str) -> Tensor:
        values, mask = self.part(name, "compressed"), self.part(name, "bitmask")
        shape = self.part(name, "shape").flatten().tolist()
        if mask.dtype != torch.uint8 or len(shape) != 2 or -(-shape[-1] // 8) != mask.shape[-1]:
            stored = self._parts[name]["bitmask"]
            raise ValueError(f"{stored} {list(mask.shape)} of {mask.dtype} does not fit {shape}")
        bits = (mask[..., None] >> torch.arange(8, dtype=torch.uint8)).flatten(-2)[
            :, : shape[1]
        ] & 1
        count = int(bits.sum())
        if bits.shape[0] != shape[0] or count != values.numel():
            where = self._parts[name]["compressed"]
            raise ValueError(f"{where} has {values.numel()} values, its bitmask {count}")
        narrow = values.dtype.itemsize == 1  # 8 bit floats have no masked assignment
        dense = torch.zeros(shape, dtype=torch.uint8 if narrow else values.dtype)
        dense[bits.bool()] = (values.view(torch.uint8) if narrow else values).flatten()
        return dense.view(values.dtype)
