"""Device: a stream of work, events in it, and pinned host buffers for copies.

``launch`` puts work on the stream, which runs it in order. A CPU has done the work when ``launch``
returns; a GPU does it later, and the simulated device of the tests as late as it may. So launched
work must not read what the host changes meanwhile, and the host must wait for the event behind a
result before it reads it.
"""

import gc
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import ConfigError, InvariantError

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


class _CudaEvent:
    """Waits without holding the GIL."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """One NVIDIA GPU. Its stream becomes the current one of the thread that makes the device, so
    that plain torch calls of that thread are ordered with the steps."""

    is_synchronous = False

    def __init__(self, index: int, collects: bool = False) -> None:
        """``collects``: let the garbage collector run during a recording."""
        self.where = cuda_device(index)
        self._collects = collects
        torch.cuda.set_device(self.where)
        self._stream = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._pool: Any = None  # memory that all graphs share: only one runs at a time

    def launch(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def pinned(self, num_ints: int) -> Tensor:
        return torch.zeros(num_ints, dtype=torch.int32, pin_memory=True)

    def upload(self, host: Tensor, target: Tensor) -> None:
        target.copy_(host, non_blocking=True)

    def download(self, make: Callable[[], Tensor], host: Tensor) -> None:
        host.copy_(make(), non_blocking=True)

    def capture(self, work: Work) -> Graph:
        for _ in range(2):  # kernels are compiled and libraries choose theirs before the recording
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        was_on = gc.isenabled()
        if not self._collects:
            gc.disable()  # a recording takes less time
        try:
            # other threads of the process may use the device meanwhile
            mode = "thread_local"
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                work()
        finally:
            if was_on:
                gc.enable()
        return graph

    def free_bytes(self) -> int:
        """Bytes that can still be allocated: the driver's, and those that torch holds unused."""
        unused = torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
        return int(torch.cuda.mem_get_info(self.where)[0]) + unused

    def total_bytes(self) -> int:
        """Bytes of the card."""
        return int(torch.cuda.mem_get_info(self.where)[1])

    def peak_bytes(self, work: Work) -> int:
        """The peak of what ``work`` allocates, beyond what was allocated before."""
        self._stream.synchronize()
        torch.cuda.reset_peak_memory_stats(self.where)
        before = torch.cuda.memory_allocated(self.where)
        work()
        self._stream.synchronize()
        return int(torch.cuda.max_memory_allocated(self.where)) - before

    def reclaim_memory(self) -> bool:
        self._stream.synchronize()
        before = torch.cuda.memory_reserved(self.where)
        self.empty_cache()
        return torch.cuda.memory_reserved(self.where) < before

    def empty_cache(self) -> None:
        """Return torch's unused memory to the driver."""
        gc.collect()
        torch.cuda.empty_cache()


def cuda_device(index: int) -> torch.device:
    """The GPU with this index; ConfigError with a value that works if there is none."""
    if torch.version.cuda is None:
        raise ConfigError(
            "--device cuda: this torch was built without CUDA; install a CUDA build of torch, or "
            "use --device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is visible; --device cpu works")
    count = torch.cuda.device_count()
    if index >= count:
        works = "0" if count == 1 else f"0 to {count - 1}"
        raise ConfigError(f"--base-gpu-id {index}: there is no such GPU; {works} works")
    return torch.device("cuda", index)


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
