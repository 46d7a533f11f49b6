"""Pinned host buffers, from and to which copies are asynchronous."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvariantError
from radixlm.devices.device import Device, Event


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
