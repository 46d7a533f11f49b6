"""CudaDevice: the stream of one NVIDIA GPU, and its memory."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.devices.device import Event, Graph, Work


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
