"""Launches kernels with little work on the host, and sizes of grids.

At every ``kernel[grid](...)`` Triton works out anew what the arguments mean for the compiler and
calls its hooks; a GPU needs less time for many kernels. ``launch`` leaves that to Triton for the
first launch of a kind, and starts the compiled kernel directly from then on.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MAX_KNOWN = 4096  # kinds of launches; numbers of tokens make ever new ones
_dtype_of = attrgetter("dtype")
_offset_of = (15).__and__  # pointers to multiples of 16 bytes are compiled for separately

# by kind: the compiled kernel, and its arguments after those that are given by place
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own is made for kernels, and slow elsewhere."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 0 of 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...],
    **named: Any,
) -> None:
    """``kernel[grid](*tensors, *numbers, **named)``; ``named``: constants and options.

    Launches are of one kind if all numbers are the same, and the dtypes and alignment of tensors:
    Triton compiles by less than that. Kernels in the interpreter, and launches with hooks, take
    Triton's own way."""
    if type(kernel) is not JITFunction or _has_hooks():
        kernel[grid](*tensors, *numbers, **named)
        return
    device = driver.active.get_current_device()
    try:
        places = [*map(Tensor.data_ptr, tensors)]
    except TypeError:  # some kernels take None or a number where others take a tensor
        kernel[grid](*tensors, *numbers, **named)
        return
    values = (*numbers, *named.values())
    kind = (
        kernel.fn, device, *map(_dtype_of, tensors), *map(_offset_of, places),
        *values, *map(type, values), *named,
    )  # fmt: skip
    known = _known.get(kind)
    if known is None:
        compiled = kernel[grid](*tensors, *numbers, **named)
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _known[kind] = compiled, tuple(named[name] for name in names)
        return
    compiled, constants = known
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, driver.active.get_current_stream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *places, *numbers, *constants,
    )  # fmt: skip


def _has_hooks() -> bool:
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
