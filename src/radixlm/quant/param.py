"""Param: a named hole of the model that a checkpoint fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Storage = Literal["weight", "float32"]


@dataclass(frozen=True, slots=True)
class Shard:
    """How tensor parallelism cuts a parameter: along ``dim``, each of ``parts`` (row counts of
    joined sub-matrices, such as q, k, v) for itself."""

    dim: int
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class Param:
    """One tensor of a layer. ``value`` is None until the loader fills it, and again after a
    kernel has packed it.

    ``storage`` "weight" follows ``--dtype``; "float32" is for small tensors (norms, sinks,
    router corrections) that are always kept in float32.
    """

    shape: tuple[int, ...]
    storage: Storage = "weight"
    shard: Shard | None = None
    value: Tensor | None = None

    def take(self) -> Tensor:
        """The value, which the caller now owns."""
        value = self.value
        assert value is not None, "a parameter was used before it was loaded"
        self.value = None
        return value
