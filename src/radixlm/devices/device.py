"""Device: a stream of work and events in it.

``launch`` puts work on the stream, which runs it in order. A CPU has done the work when ``launch``
returns; a GPU does it later, and the simulated device of the tests as late as it may. So launched
work must not read what the host changes meanwhile, and the host must wait for the event behind a
result before it reads it.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], None]


class Event(Protocol):
    """A point in the stream."""

    def wait(self) -> None:
        """Block until all work before it is done."""


class Graph(Protocol):
    """Recorded work that is launched as a whole."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One device and its stream.

    is_synchronous  work is done when ``launch`` returns, and host buffers are device memory
    """

    where: torch.device
    is_synchronous: bool

    def launch(self, work: Work) -> None:
        """Put work on the stream: torch operations that do not wait for the device."""

    def record(self) -> Event:
        """An event behind all work launched so far."""

    def pinned(self, num_ints: int) -> Tensor:
        """An int32 host buffer, from and to which copies are asynchronous."""

    def upload(self, host: Tensor, target: Tensor) -> None:
        """Launch a copy of a pinned buffer to the device."""

    def download(self, make: Callable[[], Tensor], host: Tensor) -> None:
        """Launch a copy of an int32 device tensor into a pinned buffer."""

    def capture(self, work: Work) -> Graph:
        """Record ``work``. It runs while it is recorded; replays use the same memory."""

    def reclaim_memory(self) -> bool:
        """After a failed allocation: free unused memory; whether there was some."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class _Rerun:
    """A graph for devices without graphs: runs the work again."""

    def __init__(self, work: Work) -> None:
        self.replay = work


class CpuDevice:
    """Torch on the host."""

    is_synchronous = True

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self._done = _Done()

    def launch(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        return self._done

    def pinned(self, num_ints: int) -> Tensor:
        return torch.zeros(num_ints, dtype=torch.int32)

    def upload(self, host: Tensor, target: Tensor) -> None:
        if host.data_ptr() != target.data_ptr():
            target.copy_(host)

    def download(self, make: Callable[[], Tensor], host: Tensor) -> None:
        host.copy_(make())

    def capture(self, work: Work) -> Graph:
        work()
        return _Rerun(work)

    def reclaim_memory(self) -> bool:
        return False
