"""Param: a named hole of the model that a checkpoint fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.quant.quantized_weight import QuantizedWeight

Storage = Literal["weight", "float32", "int64"]


class Shard(Record):
    """How tensor parallelism cuts a parameter: along ``dim``, each of ``parts`` (row counts of
    joined sub-matrices, such as q, k, v) for itself."""

    dim: int
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class Param:
    """One tensor of a layer. ``value`` is None until the loader fills it, and again after its
    layer has taken it.

    ``storage`` "weight" follows ``--dtype``; "float32" is for small tensors (norms, sinks,
    router corrections) that are always kept in float32, "int64" for tables of numbers. A borrowed
    value lies in memory of the loader (a mapped file, a buffer that it uses again) and is valid
    until the layer is finished.
    ``accepts_quantized``: the layer can pack a grid, which then fills it in place of a value.
    """

    shape: tuple[int, ...]
    storage: Storage = "weight"
    shard: Shard | None = None
    value: Tensor | None = None
    is_borrowed: bool = False
    accepts_quantized: bool = False
    quantized: QuantizedWeight | None = None

    def take(self) -> Tensor:
        """The value, which the caller may keep."""
        is_borrowed = self.is_borrowed
        value = self.borrow()
        return value.clone(memory_format=torch.contiguous_format) if is_borrowed else value

    def borrow(self) -> Tensor:
        """The value, to be copied by the caller at once."""
        value = self.value
        assert value is not None, "a parameter was used before it was loaded"
        self.value, self.is_borrowed = None, False
        return value
