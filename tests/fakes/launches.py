"""Records the kernels that Triton would compile: the launches of a process, distinguished by the
types and values that are compiled in. Install it after tests/fakes/cuda.py.

Kernels only record their launch, because the interpreter would take minutes for shapes of real
models. Values that the host reads from their outputs, or that torch uses as indices, are zeros.
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
# (kernel, compiled-in types and values) -> the phase of its first launch
MET: dict[tuple[str, str], str] = {}
_phase = ["start"]
_binders: dict[Any, Callable[..., Any]] = {}


def enter(phase: str) -> None:
    """Launches from now on belong to `phase`."""
    _phase[0] = phase


def late() -> list[str]:
    """Kernels first launched after the start, with their phase."""
    return [f"{phase}: {name} {key}" for (name, key), phase in MET.items() if phase != "start"]


def install() -> None:
    """Patch Triton for the rest of the process; use it only in a process of its own."""
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
