"""A process whose GPU is the CPU; call `install()` before radixlm is imported. Tensors on "cuda"
are made on the host, kernels run in Triton's interpreter, and the used parts of `torch.cuda` are
emulated. So all GPU code paths run without a GPU: calls with wrong arguments show, and so do
synchronisations in the wrong place.

Synchronisations are recorded in `WAITS` while `watch` is on, and are an error during the capture of
a graph.
"""

from __future__ import annotations

import importlib
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.fakes.interpreter import replace_language_once_a_launch

READS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
WAITS: Counter[str] = Counter()
_watched = threading.local()


class _Recording(threading.local):  # ranks may be threads
    is_on = False


_recording = _Recording()


@contextmanager
def watch() -> Iterator[None]:
    """Record synchronisations of this thread."""
    before, _watched.is_on = getattr(_watched, "is_on", False), True
    try:
        yield
    finally:
        _watched.is_on = before


def _note(what: str) -> None:
    if _recording.is_on:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
    if getattr(_watched, "is_on", False):
        ours = [f for f in traceback.extract_stack() if "radixlm" in f.filename]
        places = (f"{f.filename.rpartition('radixlm/')[2]}:{f.lineno}" for f in ours[:-4:-1])
        WAITS[f"{what}: {' < '.join(places)}"] += 1


def _is_gpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or value == "cuda"


class _Mode(TorchFunctionMode):
    """Intercepts torch calls so that "cuda" means the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        values = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, torch.Tensor)]
        is_copied = name in ("to", "tensor", "as_tensor") and not kwargs.get("non_blocking")
        if is_copied and any(map(_is_gpu, values)):
            _note(f"{name} from {'a tensor of the host' if tensors else 'numbers'}")
        args = tuple("cpu" if not isinstance(a, torch.Tensor) and _is_gpu(a) else a for a in args)
        return func(*args, **{k: "cpu" if _is_gpu(v) else v for k, v in kwargs.items()})


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def synchronize(self) -> None:
        _note("synchronize")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded and not _recording.is_on


class CUDAGraph:
    """Holds nothing; `CudaDevice.capture` repeats the work instead."""


class graph:
    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:  # fmt: skip
        assert isinstance(cuda_graph, CUDAGraph) and isinstance(stream, Stream)
        assert capture_error_mode in ("global", "thread_local", "relaxed")

    def __enter__(self) -> None:
        _recording.is_on = True

    def __exit__(self, *_: object) -> None:
        _recording.is_on = False


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda *device: _note("synchronize"),
    "empty_cache": lambda: None,
    "is_current_stream_capturing": lambda: _recording.is_on,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="host", major=9, minor=0, multi_processor_count=4, total_memory=80 << 30
    ),
    "mem_get_info": lambda device=None: (2 << 30, 80 << 30),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "set_stream": lambda stream: None,
    "current_stream": lambda device=None: Stream(device),
    "graph_pool_handle": lambda: (0, 1),
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
}


def install() -> None:
    """Patch torch for the rest of the process; use it only in a process of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.runtime.interpreter")
    replace_language_once_a_launch()
    for name, function in _CUDA.items():
        setattr(torch.cuda, name, function)
    torch.version.cuda = "12.8"
    for name in READS:
        setattr(torch.Tensor, name, _noted(name, getattr(torch.Tensor, name)))
    run = threading.Thread.run

    def run_with_mode(self: threading.Thread) -> None:
        with _Mode():
            run(self)

    threading.Thread.run = run_with_mode  # type: ignore[method-assign]


def rerun_graphs() -> None:
    """A replayed graph repeats its captured work. Call it after `install`."""
    from radixlm.devices.cuda import CudaDevice  # reads torch.cuda at import

    capture = CudaDevice.capture

    def captured(self: CudaDevice, work: Callable[[], None]) -> Any:
        graph: Any = capture(self, work)
        graph.replay = work
        return graph

    CudaDevice.capture = captured  # type: ignore[method-assign]


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _note(name)
        return function(self, *args, **kwargs)

    return read
