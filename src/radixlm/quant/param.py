"""Param: a named parameter of a layer that a checkpoint fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from radixlm.base.record import Record, replace
from radixlm.kernels.packing import kept
from radixlm.quant.quantized_weight import QuantizedWeight

Storage = Literal["weight", "float32", "int64"]


class Shard(Record):
    """How tensor parallelism shards a parameter: along ``dim``, each of ``parts`` (row counts of
    concatenated matrices, such as q, k, v) separately."""

    dim: int
    parts: tuple[int, ...] = ()


class Cut(Record):
    """The part of a parameter that a rank holds: these half-open ranges of the ``whole`` entries
    along ``dim``, one after another."""

    dim: int
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def of(self, value: Tensor) -> Tensor:
        """The part of a whole value: a view if it is one range."""
        parts = [value.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def within(self, begin: int, end: int) -> Cut:
        """The part that lies in the entries from ``begin`` to ``end``, counted from ``begin``."""
        inside = ((max(b, begin) - begin, min(e, end) - begin) for b, e in self.ranges)
        ranges = tuple((b, e) for b, e in inside if b < e) or ((0, 0),)
        return replace(self, whole=end - begin, ranges=ranges)


@dataclass(slots=True)
class Param:
    """One tensor of a layer. ``value`` is None until the loader fills it, and again after its
    layer has taken it.

    ``storage`` "weight" follows ``--dtype``; "float32" is for small tensors (norms, sinks, router
    corrections) that stay in float32, "int64" for tables of numbers. A borrowed value lies in
    memory of the loader (a mapped file, a reused buffer) and is valid until the layer is finished.
    ``accepts_quantized``: the layer can pack a ``quantized`` weight in place of a ``value``.
    ``cuts``: what this rank holds of a parameter whose ``shape`` is the rank's own.
    """

    shape: tuple[int, ...]
    storage: Storage = "weight"
    shard: Shard | None = None
    value: Tensor | None = None
    is_borrowed: bool = False
    accepts_quantized: bool = False
    quantized: QuantizedWeight | None = None
    cuts: tuple[Cut, ...] = ()

    def cut(self, *cuts: Cut) -> Param:
        """Hold these parts only; the parameter itself, which was whole."""
        for cut in cuts:
            assert self.shape[cut.dim] == cut.whole, (self.shape, cut)
            self.shape = (*self.shape[: cut.dim], cut.size, *self.shape[cut.dim + 1 :])
        self.cuts = cuts
        return self

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        wholes = {cut.dim: cut.whole for cut in self.cuts}
        return tuple(wholes.get(dim, size) for dim, size in enumerate(self.shape))

    def cuts_of(self, dim: int, sizes: Sequence[int]) -> list[Cut]:
        """The cut along ``dim`` for each of the parts of these sizes that are joined there."""
        whole = Cut(dim, sum(sizes), ((0, sum(sizes)),))
        cut = next((cut for cut in self.cuts if cut.dim == dim), whole)
        ends = accumulate(sizes)
        return [cut.within(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's part of a value of ``whole_shape``; a value of another shape as it is."""
        return self.sliced(value) if tuple(value.shape) == self.whole_shape else value

    def sliced(self, value: Tensor) -> Tensor:
        """This rank's part of a tensor that belongs to the value: the weight, its scales."""
        for cut in self.cuts:
            value = cut.of(value)
        return value

    def fill(self, value: Tensor, weight_dtype: torch.dtype | None, device: torch.device) -> None:
        """Set the value in the dtype that ``--dtype`` and ``storage`` ask for. It is borrowed, not
        copied, if its dtype, device and layout are right already."""
        dtype = weight_dtype or value.dtype
        if self.storage == "float32" or dtype == torch.float64:
            dtype = torch.float32
        if self.storage == "int64":
            dtype = torch.int64
        is_right = value.dtype == dtype and value.device.type == device.type
        self.is_borrowed = is_right and value.is_contiguous()
        self.value = value if self.is_borrowed else value.to(device, dtype).contiguous()

    def take(self) -> Tensor:
        """The value, which the caller may keep."""
        is_borrowed = self.is_borrowed
        value = self.borrow()
        if is_borrowed:
            value = value.clone(memory_format=torch.contiguous_format)
        kept(self, value)
        return value

    def borrow(self) -> Tensor:
        """The value, which the caller must copy before the layer is finished."""
        value = self.value
        assert value is not None, "a parameter was used before it was loaded"
        self.value, self.is_borrowed = None, False
        return value
