"""Groups of ranks whose tensors lie on GPUs. Each stands for a group of the host, which still takes
the tensors that lie there.

Legend: T rows (tokens), N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from radixlm.base.record import replace
from radixlm.distributed.groups import Group, PieceGroup, Ranks, Shape
from radixlm.distributed.topology import Topology

# the groups of layers; pipeline stages hand over through the host
_KINDS = ("tp", "attn", "experts", "expert_tp")


class StagedGroup:
    """Tensors pass through the memory of ``host``, which waits for the device each time: for ranks
    that share a GPU, between which NCCL does not work. ``where``: what is received goes there."""

    def __init__(self, host: Group, where: torch.device) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._where = host, where

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        return self._host.all_gather_columns(x_TN.cpu(), bounds).to(x_TN.device)

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        return self._host.all_gather_rows(x_TN.cpu(), counts).to(x_TN.device)

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        whole = self._host.gather_columns(x_TN.cpu(), bounds)
        return None if whole is None else whole.to(x_TN.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._host.all_reduce(x.cpu()).to(x.device)

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        out = self._host.all_to_all_rows(x_TN.cpu(), send_counts, receive_counts)
        return out.to(x_TN.device)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._host.broadcast(x.cpu(), source).to(x.device)

    def send(self, x: Tensor, to: int) -> None:
        self._host.send(x.cpu(), to)

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        return self._host.receive(shape, dtype, source).to(self._where)

    def barrier(self) -> None:
        self._host.barrier()


class Comm(Protocol):
    """What moves bytes between the GPUs of a group, in the order of their streams; the host waits
    for nothing. ``distributed.nccl.NcclComm`` is one."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape] on all; each brings a contiguous tensor of the same shape."""

    def broadcast(self, x: Tensor, source: int) -> None:
        """Write ``source``'s contiguous tensor into those of the others."""

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send one contiguous tensor to each rank, and write one from each; empty ones do not
        travel."""


class NcclGroup(PieceGroup):
    """Tensors pass between GPUs by ``comm``. Sums are added in the order of the ranks. ``host`` as
    above; between single ranks tensors pass through it, too."""

    def __init__(self, host: Group, where: torch.device, comm: Comm) -> None:
        super().__init__(host.rank, host.size)
        self._staged, self._comm = StagedGroup(host, where), comm
        self.send, self.receive = self._staged.send, self._staged.receive  # type: ignore[method-assign]
        self.barrier = self._staged.barrier  # type: ignore[method-assign]
        self._where = where.type

    def _is_elsewhere(self, x: Tensor) -> bool:
        return x.device.type != self._where

    def exchange(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pieces = self._gathered(x.reshape(-1), max(sizes))
        return [piece[:size].view(s) for piece, size, s in zip(pieces, sizes, shapes, strict=True)]

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        if self._is_elsewhere(x_TN):
            return self._staged.all_gather_columns(x_TN, bounds)
        widths = [end - begin for begin, end in pairwise(bounds)]
        pieces = self._gathered(x_TN, max(widths))
        return torch.cat([piece[:, :n] for piece, n in zip(pieces, widths, strict=True)], 1)

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        take = self._staged.all_gather_rows if self._is_elsewhere(x_TN) else super().all_gather_rows
        return take(x_TN, counts)

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        whole = self.all_gather_columns(x_TN, bounds)
        return whole if self.rank == 0 else None

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._staged.all_reduce(x) if self._is_elsewhere(x) else super().all_reduce(x)

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        if self._is_elsewhere(x_TN):
            return self._staged.all_to_all_rows(x_TN, send_counts, receive_counts)
        out = x_TN.new_empty((sum(receive_counts), *x_TN.shape[1:]))
        sent = torch.split(x_TN.contiguous(), list(send_counts))
        self._comm.exchange(sent, torch.split(out, list(receive_counts)))
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        if self._is_elsewhere(x):
            return self._staged.broadcast(x, source)
        out = x.clone(memory_format=torch.contiguous_format)
        self._comm.broadcast(out, source)
        return out

    def _gathered(self, x: Tensor, width: int | None = None) -> Tensor:
        """The tensors of all ranks, padded to ``width`` columns."""
        missing = 0 if width is None else width - x.shape[-1]
        return self._comm.all_gather((F.pad(x, (0, missing)) if missing else x).contiguous())


def on_device(
    ranks: Ranks, topology: Topology, where: torch.device, make: Callable[[Group], Comm] | None
) -> Ranks:
    """``ranks`` with groups for tensors on ``where``. All ranks of a group call ``make``, once;
    None where ranks share a GPU."""
    made: dict[tuple[int, ...], Group] = {}
    rank = ranks.place.rank
    for kind in _KINDS:
        host: Group = getattr(ranks, kind)
        members = next(members for members in topology.groups[kind] if rank in members)
        if host.size > 1 and members not in made:
            made[members] = StagedGroup(host, where)
            if make is not None:
                made[members] = NcclGroup(host, where, make(host))
        ranks = replace(ranks, **{kind: made.get(members, host)})
    return ranks
