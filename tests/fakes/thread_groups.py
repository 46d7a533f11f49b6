"""Groups of ranks that are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.base.errors import RankLost
from radixlm.distributed.groups import SOLO, TIMEOUT_S, Group, PieceGroup, Ranks, Shape
from radixlm.distributed.topology import Topology, WorldRanks


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


def thread_groups(size: int, timeout_s: float = TIMEOUT_S) -> list[Group]:
    """One group a rank, for ``size`` threads of this process."""
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(rank, size, meeting) for rank in range(size)]


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
