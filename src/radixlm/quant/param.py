"""Param: a named parameter of a layer that a checkpoint fills."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.quant.quantized_weight import QuantizedWeight

Storage = Literal["weight", "float32", "int64"]


class Shard(Record):
    """How tensor parallelism shards a parameter: along ``dim``, each of ``parts`` (row counts of
    concatenated matrices, such as q, k, v) separately."""

    dim: int
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class Param:
    """One tensor of a layer. ``value`` is None until the loader fills it, and again after its
    layer has taken it.

    ``storage`` "weight" follows ``--dtype``; "float32" is for small tensors (norms, sinks, router
    corrections) that stay in float32, "int64" for tables of numbers. A borrowed value lies in
    memory of the loader (a mapped file, a reused buffer) and is valid until the layer is finished.
    ``accepts_quantized``: the layer can pack a ``quantized`` weight in place of a ``value``.
    """

    shape: tuple[int, ...]
    storage: Storage = "weight"
    shard: Shard | None = None
    value: Tensor | None = None
    is_borrowed: bool = False
    accepts_quantized: bool = False
    quantized: QuantizedWeight | None = None

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
        return value.clone(memory_format=torch.contiguous_format) if is_borrowed else value

    def borrow(self) -> Tensor:
        """The value, which the caller must copy before the layer is finished."""
        value = self.value
        assert value is not None, "a parameter was used before it was loaded"
        self.value, self.is_borrowed = None, False
        return value
