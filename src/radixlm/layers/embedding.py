"""Token and position tables. Legend: T tokens, V rows, D channels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.ops.linear import TiedTable
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.quant.param import Param, Shard, Storage


class Embedding(Module):
    """A table in the checkpoint's dtype; ``run`` returns rows in the compute dtype."""

    tied: TiedTable  # the table as rows and as output head

    def __init__(
        self,
        rows: int,
        dim: int,
        context: LayerContext,
        scale: float = 1.0,
        tied_fmt: str | None = None,
    ) -> None:
        """With ``tied_fmt`` the table is also the output head, in that format."""
        storage: Storage = "weight" if tied_fmt is None else context.scheme.head_storage
        self.weight = Param((rows, dim), storage, Shard(0))
        self.rows, self.dim, self.scale = rows, dim, scale
        self._dtype = context.compute_dtype
        self._kernels, self._tied_fmt = context.kernels, tied_fmt

    def finish(self) -> None:
        self._table_VD: Tensor | None = None
        if self._tied_fmt is None:
            self._table_VD = self.weight.take()
            return
        kernels = self._kernels
        table = self.weight.borrow() if kernels.copies_weights else self.weight.take()
        self.tied = kernels.pack_tied(table, self._tied_fmt)

    @property
    def plain_table(self) -> Tensor | None:
        """The table itself; None when it is shared with the head."""
        return self._table_VD

    def unpack(self) -> Tensor:
        """The table [V, D] in the checkpoint's dtype."""
        return self.tied.unpack() if self._table_VD is None else self._table_VD

    def run(self, ids_T: Tensor) -> Tensor:
        """Rows ``ids``, scaled: [T, D]."""
        if self._table_VD is None:
            return self.tied.rows(ids_T, self.scale, self._dtype)
        return self._kernels.embedding(ids_T, self._table_VD, self.scale, self._dtype)


class Affine(Module):
    """(x + bias) * scale, learned numbers a channel."""

    def __init__(self, dim: int) -> None:
        self.bias, self.scale = Param((dim,), "float32"), Param((dim,), "float32")

    def finish(self) -> None:
        self._bias_D, self._scale_D = self.bias.take(), self.scale.take()

    def run(self, x_TD: Tensor) -> Tensor:
        """A new tensor in the dtype of x."""
        return ((x_TD + self._bias_D) * self._scale_D).to(x_TD.dtype)


def sinusoids(rows_T: Tensor, dim: int, steps: int = 0) -> Tensor:
    """Row ``p`` of the table of sines, then cosines, of p / 10000 ** (i / steps), where steps is
    D / 2 - 1 unless given; [T, D]."""
    half = dim // 2
    steps = steps or half - 1
    powers = torch.arange(half, dtype=torch.float32, device=rows_T.device) / steps
    angles = rows_T[:, None].float() * torch.exp(powers * -math.log(10000.0))
    return F.pad(torch.cat((angles.sin(), angles.cos()), -1), (0, dim - 2 * half))
