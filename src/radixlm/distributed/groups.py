"""Groups of ranks and what they do together. Legend: T rows (tokens), N columns.

Every collective is entered by all ranks of the group in the same order. Its result does not depend
on the number of rows nor on which rank comes first. ``RankLost`` ends every wait when a rank of the
group is gone or when ``timeout_s`` has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from radixlm.base.errors import RankLost
from radixlm.base.record import Record
from radixlm.distributed.topology import Place

TIMEOUT_S = 30.0
Shape = tuple[int, ...]


class Group(Protocol):
    """``size`` ranks, of which this one is number ``rank``."""

    rank: int
    size: int

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """[T, bounds[-1]] on all; rank r brings the columns bounds[r]:bounds[r + 1]."""

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[sum(counts), N] on all; rank r brings counts[r] rows."""

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        """Like ``all_gather_columns``, but only rank 0 gets the result."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in the order 0..size-1; 16-bit floats are added in fp32."""

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        """[sum(receive_counts), N]: ``x`` holds the rows for rank 0, then for rank 1, ...;
        the result holds those from rank 0, then from rank 1, ..."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """``source``'s tensor on all; the others bring one of the same shape and dtype."""

    def send(self, x: Tensor, to: int) -> None:
        """Hand ``x`` to rank ``to``, which calls ``receive`` with its shape and dtype."""

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        """The next tensor that ``source`` sent to this rank."""

    def barrier(self) -> None:
        """Return when all ranks have come."""


class PieceGroup:
    """Collectives made of one exchange of pieces: each rank sees what each brought."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """All ranks' tensors, in rank order; rank r brings one of ``shapes[r]``."""
        raise NotImplementedError

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        shapes = [(x_TN.shape[0], end - begin) for begin, end in pairwise(bounds)]
        return torch.cat(self.exchange(x_TN, shapes), 1)

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        return torch.cat(self.exchange(x_TN, [(n, *x_TN.shape[1:]) for n in counts]))

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        gathered = self.all_gather_columns(x_TN, bounds)
        return gathered if self.rank == 0 else None

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self.exchange(x, [tuple(x.shape)] * self.size)
        total = first.float() if x.dtype in (torch.bfloat16, torch.float16) else first.clone()
        for piece in others:
            total += piece
        return total.to(x.dtype)

    def barrier(self) -> None:
        self.exchange(torch.empty(0), [(0,)] * self.size)


class SoloGroup:
    """A group of one rank: nothing is copied."""

    rank = 0
    size = 1

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        return x_TN

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        return x_TN

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        return x_TN

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        return x_TN

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise RankLost(f"a group of one rank has no rank {to}")

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        raise RankLost(f"a group of one rank has no rank {source}")

    def barrier(self) -> None:
        pass


SOLO: Group = SoloGroup()


class Ranks(Record):
    """The place of a rank and its groups, each of which holds this rank."""

    place: Place = Place()
    world: Group = SOLO
    tp: Group = SOLO
    attn: Group = SOLO
    experts: Group = SOLO
    expert_tp: Group = SOLO
    stages: Group = SOLO


ALONE = Ranks()
