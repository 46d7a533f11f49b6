"""A device that does its work as late as possible: its stream runs queued work only when an event
is waited for, or at random by a seed. Errors of asynchronous code show at once:

* a pinned buffer that changes during its copy is an error,
* results on the host are garbage until the event after their copy was waited for.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

NONSENSE = -(2**31)


def _sum(host: Tensor) -> int:
    return zlib.crc32(host.numpy().tobytes())


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self._device, self._number = device, number

    def wait(self) -> None:
        self._device.run_to(self._number)

    @property
    def is_done(self) -> bool:
        return self._device.num_done >= self._number


class SimulatedGraph:
    """Replays run late too: the stream calls `replay` when it reaches it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class SimulatedDevice:
    """Torch on the host with queued work that runs late and in order."""

    is_synchronous = False

    def __init__(self, seed: int = 0, eagerness: float = 0.2) -> None:
        """`eagerness`: probability that some work runs at each call."""
        self.where = torch.device("cpu")
        self._random, self._eagerness = random.Random(seed), eagerness
        self._queue: deque[Callable[[], None]] = deque()
        self.num_launched = 0
        self.num_done = 0
        self.most_waiting = 0

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.num_launched += 1
        self.most_waiting = max(self.most_waiting, len(self._queue))
        while self._queue and self._random.random() < self._eagerness:
            self._run_one()

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self, self.num_launched)

    def pinned(self, num_ints: int) -> Tensor:
        return torch.zeros(num_ints, dtype=torch.int32)

    def upload(self, host: Tensor, target: Tensor) -> None:
        before = _sum(host)

        def copy() -> None:
            assert _sum(host) == before, "a pinned buffer was written while its copy was under way"
            target.copy_(host)

        self.launch(copy)

    def download(self, make: Callable[[], Tensor], host: Tensor) -> None:
        host.fill_(NONSENSE)
        before = _sum(host)

        def copy() -> None:
            assert _sum(host) == before, "a pinned buffer was given to two copies"
            host.copy_(make())

        self.launch(copy)

    def capture(self, work: Callable[[], None]) -> SimulatedGraph:
        assert not self._queue, "a recording with work in flight"
        work()
        return SimulatedGraph(work)

    def reclaim_memory(self) -> bool:
        return False

    def run_to(self, number: int) -> None:
        while self.num_done < number:
            self._run_one()

    def _run_one(self) -> None:
        self._queue.popleft()()
        self.num_done += 1
