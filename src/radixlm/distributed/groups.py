"""Groups of ranks and what they do together. Legend: T rows (tokens), N columns.

Every collective is entered by all ranks of the group in the same order. Its result does not depend
on the number of rows nor on which rank comes first. ``RankLost`` ends every wait when a rank of the
group is gone or when ``timeout_s`` has passed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from radixlm.base.errors import RankLost
from radixlm.base.record import Record
from radixlm.distributed.topology import Place, Topology, WorldRanks

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

    def gather_columns(
        self, x_TN: Tensor, bounds: tuple[int, ...], target: int = 0
    ) -> Tensor | None:
        """Like ``all_gather_columns``, but only rank ``target`` gets the result."""

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

    def gather_columns(
        self, x_TN: Tensor, bounds: tuple[int, ...], target: int = 0
    ) -> Tensor | None:
        gathered = self.all_gather_columns(x_TN, bounds)
        return gathered if self.rank == target else None

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self.exchange(x, [tuple(x.shape)] * self.size)
        total = first.float() if x.dtype in (torch.bfloat16, torch.float16) else first.clone()
        for piece in others:
            total += piece
        return total.to(x.dtype)

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        parts = torch.split(x_TN, list(send_counts))
        for to, part in enumerate(parts):
            if to != self.rank:
                self.send(part, to)
        received = [
            self.receive((n, *x_TN.shape[1:]), x_TN.dtype, source) if source != self.rank else part
            for source, (n, part) in enumerate(zip(receive_counts, parts, strict=True))
        ]
        return torch.cat(received)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self.exchange(x, [tuple(x.shape)] * self.size)[source].clone()

    def send(self, x: Tensor, to: int) -> None:
        raise NotImplementedError

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        raise NotImplementedError

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

    def gather_columns(
        self, x_TN: Tensor, bounds: tuple[int, ...], target: int = 0
    ) -> Tensor | None:
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


class _Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.pieces: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.mail: list[queue.SimpleQueue[Tensor | None]] = [
            queue.SimpleQueue() for _ in range(size * size)
        ]


class ThreadGroup(PieceGroup):
    """A rank of a group of threads of one process."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting

    def exchange(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        assert tuple(x.shape) == tuple(shapes[self.rank]), (tuple(x.shape), shapes, self.rank)
        # a copy: the owner may write into its tensor as soon as it has left
        self._meeting.pieces[self.rank] = x.detach().clone()
        try:
            self._meeting.barrier.wait()
            pieces = list(self._meeting.pieces)
            self._meeting.barrier.wait()  # nobody brings the next piece before all have read
        except threading.BrokenBarrierError as error:
            raise RankLost(f"a rank of {self.size} threads is gone") from error
        return pieces

    def send(self, x: Tensor, to: int) -> None:
        self._meeting.mail[self.rank * self.size + to].put(x.detach().clone())

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        mail = self._meeting.mail[source * self.size + self.rank]
        try:
            x = mail.get(timeout=self._meeting.timeout_s)
        except queue.Empty as error:
            raise RankLost(f"rank {source} sent nothing in time") from error
        if x is None:
            raise RankLost(f"a rank of {self.size} threads is gone")
        assert x.shape == shape and x.dtype == dtype, (x.shape, shape, x.dtype, dtype)
        return x

    def poison(self) -> None:
        """End every wait of the group, now and later, with ``RankLost``."""
        self._meeting.barrier.abort()
        for mail in self._meeting.mail:
            mail.put(None)


SOLO: Group = SoloGroup()


def thread_groups(size: int, timeout_s: float = TIMEOUT_S) -> list[Group]:
    """One group a rank, for ``size`` threads of this process."""
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(rank, size, meeting) for rank in range(size)]


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


def thread_ranks(topology: Topology) -> list[Ranks]:
    """The ranks of a whole replica as threads of this process."""

    def of(groups: WorldRanks) -> list[Group]:
        found = {
            rank: group
            for ranks in groups
            for rank, group in zip(ranks, thread_groups(len(ranks)), strict=True)
        }
        return [found[rank] if len(groups) < topology.world else SOLO for rank in sorted(found)]

    kinds = {
        "world": thread_groups(topology.world),
        "tp": of(topology.tp_groups),
        "attn": of(topology.attn_groups),
        "experts": of(topology.expert_groups),
        "expert_tp": of(topology.expert_tp_groups),
        "stages": of(topology.stage_chains),
    }
    return [
        Ranks(topology.place(r), **{kind: kinds[kind][r] for kind in kinds})
        for r in range(topology.world)
    ]
