"""The shared memory of the ranks of one host: groups of ranks, streams between stages, plan ring.

One memfd holds everything. Who creates it hands its descriptor down to the other ranks, so no name
is left behind when they die. Every rank computes the same ``Layout``. ``csrc/runtime/shm.h`` has
the protocol.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.distributed.groups import SOLO, TIMEOUT_S, Group, PieceGroup, Ranks, Shape
from radixlm.distributed.ring import PlanRing
from radixlm.distributed.topology import Topology
from radixlm.kernels.cpu.extension import native

# what a wake from the futex costs; longer spins take cores from those that still compute
SPIN_US = 20.0
HEADER_BYTES = 4096
FLAG_BYTES = 64
PAGE = 4096
KINDS = ("world", "tp", "attn", "experts", "expert_tp", "stages")


class Sizes(Record):
    """Bytes of the parts of a segment; pages that nobody touches take no memory.

    ``slot``: of a round of a collective; more passes in several rounds. ``common``: what the ranks
    of a step program write for each other in place; larger steps pass through slots. ``stream``:
    between two stages; ``link``: between other pairs; ``ring``: of plans. The last three: powers of
    two."""

    slot: int = 1 << 20
    common: int = 1 << 32
    stream: int = 1 << 26
    link: int = 1 << 16
    ring: int = 1 << 23


DEFAULT_SIZES = Sizes()


class Area(Record):
    """Where one group or stream lies: number of its first flag, offset of its bytes."""

    first_flag: int
    offset: int


class Layout:
    """Where everything lies, for the ranks of ``topology`` that share this host."""

    def __init__(
        self, topology: Topology, ranks: Sequence[int] | None = None, sizes: Sizes = DEFAULT_SIZES
    ) -> None:
        here = tuple(range(topology.world)) if ranks is None else tuple(ranks)
        self.topology, self.ranks, self.sizes = topology, here, sizes
        self._flags, self._bytes = 0, 0
        # groups of one kind that stand again under another name share their area
        self.groups: dict[tuple[str, tuple[int, ...]], Area] = {}
        self.streams: dict[tuple[str, int, int], Area] = {}
        for kind, found in topology.groups.items():
            for members in found:
                if len(members) > 1 and set(members) <= set(here):
                    self._add_group(kind, members)
        self.ring = self._add(len(here), sizes.ring)
        self.num_flags = self._flags
        self.data = -(-(HEADER_BYTES + self._flags * FLAG_BYTES) // PAGE) * PAGE
        self.num_bytes = self.data + self._bytes

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The members of the rank's group of this kind; () when it has none on this host."""
        return next((m for k, m in self.groups if k == kind and rank in m), ())

    def common_bytes(self, kind: str) -> int:
        """Bytes that the ranks of a group of this kind write in place."""
        return self.sizes.common if kind == "tp" else 0

    def _add_group(self, kind: str, members: tuple[int, ...]) -> None:
        common = self.common_bytes(kind)
        self.groups[kind, members] = self._add(
            len(members), 2 * len(members) * self.sizes.slot + common
        )
        num_bytes = self.sizes.stream if kind == "stages" else self.sizes.link
        for source in members:
            for to in members:
                if source != to:
                    self.streams[kind, source, to] = self._add(2, num_bytes)

    def _add(self, num_flags: int, num_bytes: int) -> Area:
        area = Area(self._flags, self._bytes)
        self._flags += num_flags
        self._bytes += -(-num_bytes // PAGE) * PAGE
        return area


class Segment:
    """The mapped segment of one process. ``fd`` stays open for those that inherit it."""

    def __init__(
        self, fd: int, layout: Layout, timeout_s: float = TIMEOUT_S, spin_us: float = SPIN_US
    ) -> None:
        self.fd, self.layout, self.timeout_s = fd, layout, timeout_s
        self.native: Any = native().Segment(fd, layout.num_bytes, layout.num_flags, spin_us)

    @staticmethod
    def create(layout: Layout, timeout_s: float = TIMEOUT_S, spin_us: float = SPIN_US) -> Segment:
        """A new segment; its descriptor is not inherited unless it is handed down by name."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError("several ranks on one host need Linux: use --tp-size 1 --pp-size 1")
        fd = os.memfd_create("radixlm", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.num_bytes)
        return Segment(fd, layout, timeout_s, spin_us)

    def poison(self, reason: str) -> None:
        """End every wait of every rank with ``RankLost``; the first reason stands."""
        self.native.poison(reason)

    @property
    def reason(self) -> str:
        """Why the segment was poisoned; empty while nothing is wrong."""
        return str(self.native.reason())

    def take_waited_s(self) -> float:
        """Seconds that this process has waited for other ranks since the last call."""
        return float(self.native.take_waited_s())

    def ranks(self, rank: int) -> Ranks:
        """The groups of world rank ``rank``; those of one rank or of several hosts are ``SOLO``."""
        groups = {kind: self._group(kind, rank) for kind in KINDS}
        if self.layout.group_of("attn", rank) == self.layout.group_of("tp", rank):
            groups["attn"] = groups["tp"]  # so that one barrier holds for both
        return Ranks(self.layout.topology.place(rank), **groups)

    def ring(self, rank: int) -> PlanRing:
        """The plan ring of this host: the lowest rank here writes, the others read."""
        area, ranks = self.layout.ring, list(self.layout.ranks)
        stream = self._stream(ranks, ranks.index(rank) - 1, area, self.layout.sizes.ring)
        return PlanRing(stream, len(ranks) - 1, self.timeout_s)

    def _group(self, kind: str, rank: int) -> Group:
        members = self.layout.group_of(kind, rank)
        return ShmGroup(self, kind, members, members.index(rank)) if members else SOLO

    def _stream(self, ranks: list[int], reader: int, area: Area, num_bytes: int) -> Any:
        offset = self.layout.data + area.offset
        return native().Stream(self.native, reader, ranks, area.first_flag, offset, num_bytes)


class ShmGroup(PieceGroup):
    """A group of ranks of one host, for CPU tensors. ``native`` is what a step program calls."""

    def __init__(self, segment: Segment, kind: str, members: tuple[int, ...], rank: int) -> None:
        super().__init__(rank, len(members))
        self._segment, self._kind, self._members = segment, kind, members
        layout = segment.layout
        area = layout.groups[kind, members]
        self.native: Any = native().ShmGroup(
            segment.native,
            rank,
            list(members),
            area.first_flag,
            layout.data + area.offset,
            layout.sizes.slot,
            layout.common_bytes(kind),
            segment.timeout_s,
        )
        self._streams: dict[tuple[int, int], Any] = {}

    def exchange(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        sizes = [_numel(shape) for shape in shapes]
        whole = self._gather(x.reshape(1, -1), _cuts(sizes))
        parts = torch.split(whole.flatten(), sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def all_gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor:
        return self._gather(x_TN, bounds)

    def all_gather_rows(self, x_TN: Tensor, counts: tuple[int, ...]) -> Tensor:
        row = _numel(x_TN.shape[1:])
        flat = self._gather(x_TN.reshape(1, -1), _cuts([n * row for n in counts]))
        return flat.view(sum(counts), *x_TN.shape[1:])

    def gather_columns(self, x_TN: Tensor, bounds: tuple[int, ...]) -> Tensor | None:
        gathered = self._gather(x_TN, bounds, target=0)
        return gathered if self.rank == 0 else None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return super().all_reduce(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        self.native.all_reduce(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        x_TN = x_TN.contiguous()
        out = x_TN.new_empty((sum(receive_counts), *x_TN.shape[1:]))
        row = _numel(x_TN.shape[1:]) * x_TN.element_size()
        send, receive = ([n * row for n in counts] for counts in (send_counts, receive_counts))
        self.native.all_to_all(x_TN.data_ptr(), send, out.data_ptr(), receive)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        sizes = [x.numel() if rank == source else 0 for rank in range(self.size)]
        mine = x.reshape(1, -1)[:, : sizes[self.rank]]
        return self._gather(mine, _cuts(sizes)).view(x.shape)

    def send(self, x: Tensor, to: int) -> None:
        x = x.contiguous()
        num_bytes = x.numel() * x.element_size()
        self._stream(self.rank, to).write(x.data_ptr(), num_bytes, self._segment.timeout_s)

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        num_bytes = x.numel() * x.element_size()
        self._stream(source, self.rank).read(x.data_ptr(), num_bytes, self._segment.timeout_s)
        return x

    def barrier(self) -> None:
        self.native.barrier()

    def _gather(self, x_TN: Tensor, bounds: Sequence[int], target: int = -1) -> Tensor:
        rows, each = x_TN.shape[0], x_TN.element_size()
        begin, end = bounds[self.rank], bounds[self.rank + 1]
        assert x_TN.shape[1] == end - begin, (tuple(x_TN.shape), tuple(bounds), self.rank)
        if x_TN.shape[1] > 1 and x_TN.stride(1) != 1:
            x_TN = x_TN.contiguous()
        width = bounds[-1] if target in (-1, self.rank) else 0
        out = x_TN.new_empty((rows, width))
        row_bytes = x_TN.stride(0) * each
        bounds_bytes = [bound * each for bound in bounds]
        self.native.gather(
            x_TN.data_ptr(), row_bytes, out.data_ptr(), width * each, rows, bounds_bytes, target
        )
        return out

    def _stream(self, source: int, to: int) -> Any:
        found = self._streams.get((source, to))
        if found is None:
            layout, ranks = self._segment.layout, [self._members[source], self._members[to]]
            sizes = layout.sizes
            num_bytes = sizes.stream if self._kind == "stages" else sizes.link
            area = layout.streams[self._kind, ranks[0], ranks[1]]
            reader = 0 if self.rank == to else -1
            found = self._segment._stream(ranks, reader, area, num_bytes)
            self._streams[source, to] = found
        return found


def _cuts(sizes: Sequence[int]) -> list[int]:
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    return cuts


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
