"""Token and position tables. Legend: T tokens, V rows, D channels."""

from __future__ import annotations

from torch import Tensor

from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.linear import TiedTable
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
        self._table_VD: Tensor | None = self.weight.take()

    def share(self, kernels: Kernels, fmt: str) -> TiedTable:
        """Hand the table over to an object that is also the output head, and look rows up there."""
        assert self._table_VD is not None
        self._tied = kernels.pack_tied(self._table_VD, fmt)
        self._table_VD = None
        return self._tied

    @property
    def plain_table(self) -> Tensor | None:
        """The table itself; None when it is shared with the head."""
        return self._table_VD

    def unpack(self) -> Tensor:
        """The table [V, D] in the checkpoint's dtype."""
        return self._tied.unpack() if self._table_VD is None else self._table_VD

    def run(self, ids_T: Tensor) -> Tensor:
        """Rows ``ids``, scaled: [T, D]."""
        if self._table_VD is None:
            return self._tied.rows(ids_T, self.scale, self._dtype)
        return self._lookup(ids_T, self._table_VD, self.scale, self._dtype)
