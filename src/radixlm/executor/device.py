"""Device: a stream of work, events in it, and pinned host buffers for copies.

``launch`` puts work on the stream, which runs it in order. A CPU has done the work when ``launch``
returns; a GPU does it later, and the simulated device of the tests as late as it may. So launched
work must not read what the host changes meanwhile, and the host must wait for the event behind a
result before it reads it.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvariantError

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


class PinnedRing:
    """Pinned buffers that are used in turn. ``take`` waits until the last use of the buffer is
    over; with one step in flight, a ring of three never waits."""

    def __init__(self, device: Device, num_ints: int, size: int) -> None:
        count = 1 if device.is_synchronous else size
        self._buffers = [device.pinned(num_ints) for _ in range(count)]
        self._events: list[Event | None] = [None] * count
        self._at = -1

    @property
    def first(self) -> Tensor:
        """The buffer of a ring of one."""
        return self._buffers[0]

    def take(self) -> Tensor:
        """The next buffer."""
        self._at = (self._at + 1) % len(self._buffers)
        event = self._events[self._at]
        if event is not None:
            event.wait()
        return self._buffers[self._at]

    def mark(self, event: Event) -> None:
        """The buffer taken last is in use until ``event``."""
        self._events[self._at] = event


class AsyncCopy:
    """A copy of a step's results to the host, in a pinned buffer that is used again."""

    __slots__ = ("_event", "_host", "_ints", "_num_ints", "is_free")

    def __init__(self, device: Device, num_ints: int) -> None:
        self._host = device.pinned(num_ints)
        self._ints: NDArray[np.int32] = self._host.numpy()
        self._event: Event | None = None
        self._num_ints = 0
        self.is_free = True

    def start(self, device: Device, make: Callable[[], Tensor], num_ints: int) -> None:
        """Launch the copy of the ``num_ints`` integers that ``make`` returns."""
        if not self.is_free:
            raise InvariantError("results of a step were overwritten before they were read")
        self.is_free, self._num_ints = False, num_ints
        device.download(make, self._host[:num_ints])
        self._event = device.record()

    def wait(self) -> NDArray[np.int32]:
        """Wait for the copy and return its integers."""
        assert self._event is not None
        self._event.wait()
        self.is_free = True
        return self._ints[: self._num_ints].copy()
