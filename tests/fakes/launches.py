"""What Triton would compile: the launches of a process, told apart by the types and values that are
compiled in. To be installed behind tests/fakes/cuda.py.

Kernels do nothing here but note that they were asked for: an interpreter would take minutes for
shapes like those of real models. What the host reads of their work, or torch takes for indices, is
all zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter, jit

ZEROED = {
    "pick_kernel": ("out_ptr", "bad_ptr"),
    "logprob_kernel": ("out_ptr",),
    "route_kernel": ("weights_ptr", "ids_ptr"),
}
_HINTS = ("do_not_specialize", "do_not_specialize_on_alignment")
# (kernel, what is compiled in) -> the phase that met it first
MET: dict[tuple[str, str], str] = {}
_phase = ["start"]
_binders: dict[Any, Callable[..., Any]] = {}


def enter(phase: str) -> None:
    """What is met from here on is met in ``phase``."""
    _phase[0] = phase


def late() -> list[str]:
    """What was met only after the start, and when."""
    return [f"{phase}: {name} {key}" for (name, key), phase in MET.items() if phase != "start"]


def install() -> None:
    """For good: only in a process of its own."""
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        module = self.fn.__module__.rpartition(".")[2]
        bind = _binders.get(self.fn)
        if bind is None:
            hints = {name: self.kwargs[name] for name in _HINTS if name in self.kwargs}
            made = jit.JITFunction(self.fn, **hints)
            bind = jit.create_function_from_signature(made.signature, made.params, backend)
            _binders[self.fn] = bind
        params, kinds, options = bind(*args, **kwargs)
        key = ", ".join(f"{name} {kind}" for name, kind in zip(params, kinds, strict=True))
        name = self.fn.__name__
        MET.setdefault((f"{module}.{name}", f"{key}, {options}"), _phase[0])
        for written in ZEROED.get(name, ()):
            params[written].zero_()

    interpreter.InterpretedFunction.run = noted
