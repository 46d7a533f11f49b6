"""Token and position tables. Legend: T tokens, V rows, D channels."""

from __future__ import annotations

from torch import Tensor

from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.quant.param import Param, Shard


class Embedding(Module):
    """A table of rows, kept in the checkpoint's dtype; rows come out in the compute dtype."""

    def __init__(self, rows: int, dim: int, context: LayerContext, scale: float = 1.0) -> None:
        self.weight = Param((rows, dim), shard=Shard(0))
        self.rows, self.dim, self.scale = rows, dim, scale
        self._dtype = context.compute_dtype
        self._lookup = context.kernels.embedding

    def finish(self) -> None:
        self.table_VD = self.weight.take()

    def run(self, ids_T: Tensor) -> Tensor:
        """Rows ``ids``, scaled: [T, D]."""
        return self._lookup(ids_T, self.table_VD, self.scale, self._dtype)
