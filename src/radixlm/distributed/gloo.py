"""Groups over several hosts, by gloo: slow (some 200 us a call) and always with a timeout.

Everything travels as bytes, so that every dtype passes. Sums are added here in rank order, not by
gloo, whose order depends on the size.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, distributed

from radixlm.base.errors import RankLost
from radixlm.distributed.groups import TIMEOUT_S, PieceGroup, Shape
from radixlm.kernels.cpu.extension import native

# messages to one rank that it has not received; the next one waits
MAX_SENT = 4


class GlooGroup(PieceGroup):
    """``store``: a torch.distributed store that all ranks reach, with keys of this group only.
    ``hostname``: the local address that the others connect to, "" to let gloo choose one."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float = TIMEOUT_S, hostname: str = ""
    ) -> None:
        super().__init__(rank, size)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        device = gloo.create_device(hostname=hostname) if hostname else gloo.create_default_device()
        options._devices = [device]
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}
        self._gloo: Any = self._kept(lambda: gloo(store, rank, size, options))

    @cached_property
    def native(self) -> Any:
        """What a step program calls."""
        gather = WeakMethod(self._gather)

        def call(*args: Any) -> None:
            if (run := gather()) is not None:
                run(*args)

        return native().CalledGroup(self.rank, self.size, call)

    def _gather(
        self, x: int, ldx: int, y: int, ldy: int, rows: int, bounds: list[int], target: int
    ) -> None:
        """Columns [bounds[r], bounds[r + 1]) of y [rows] from rank r, all in bytes, on ``target``
        or, with -1, on all ranks; x and y are addresses of rows that lie ld apart."""
        own = _memory(x, ldx, rows, bounds[self.rank + 1] - bounds[self.rank])
        whole = self.all_gather_columns(own, tuple(bounds))
        if target in (-1, self.rank):
            _memory(y, ldy, rows, bounds[-1]).copy_(whole)

    def exchange(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() * x.element_size() for shape in shapes]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)  # gloo wants equal sizes
        mine[: sizes[self.rank]] = _bytes(x)
        whole = [torch.empty_like(mine) for _ in shapes]
        self._kept(lambda: self._gloo.allgather([whole], [mine]).wait())
        parts = zip(whole, sizes, shapes, strict=True)
        return [part[:size].clone().view(x.dtype).view(shape) for part, size, shape in parts]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        sent = _bytes(x).clone()
        options = distributed.BroadcastOptions()
        options.rootRank = source
        if sent.numel():
            self._kept(lambda: self._gloo.broadcast([sent], options).wait())
        return sent.view(x.dtype).view(x.shape)

    def send(self, x: Tensor, to: int) -> None:
        if not x.numel():
            return
        waiting = self._sent.setdefault(to, deque())
        if len(waiting) == MAX_SENT:
            self._kept(waiting.popleft()[0].wait)
        sent = _bytes(x).clone()  # gloo reads it until the other rank has received it
        waiting.append((self._kept(lambda: self._gloo.send([sent], to, 0)), sent))

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        if x.numel():
            self._kept(lambda: self._gloo.recv([_bytes(x)], source, 0).wait())
        return x

    def all_to_all_rows(
        self, x_TN: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        row = torch.Size(x_TN.shape[1:]).numel() * x_TN.element_size()
        out = x_TN.new_empty((sum(receive_counts), *x_TN.shape[1:]))
        send, receive = ([n * row for n in counts] for counts in (send_counts, receive_counts))
        options = distributed.AllToAllOptions()
        to, sent = _bytes(out), _bytes(x_TN)
        self._kept(lambda: self._gloo.alltoall_base(to, sent, receive, send, options).wait())
        return out

    def _kept(self, work: Callable[[], Any]) -> Any:
        """Do it; what gloo says of a closed connection or of a timeout means a lost rank."""
        try:
            return work()
        except RuntimeError as error:
            raise RankLost(f"a rank of {self.size} is lost: {error}") from error


def _bytes(x: Tensor) -> Tensor:
    """The elements as bytes [n]; of the same memory when they lie in a row."""
    return x.contiguous().flatten().view(torch.uint8)


def _memory(address: int, ld: int, rows: int, width: int) -> Tensor:
    """Bytes [rows, width] at an address; rows lie ``ld`` apart."""
    if not rows or not width:
        return torch.empty(rows, width, dtype=torch.uint8)
    memory = (ctypes.c_char * ((rows - 1) * ld + width)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((rows, width), (ld, 1))
