"""What stands between layers and the functions that pack their weights, while a model loads: it
records what they make, or gives back what was recorded (weights/packed_cache.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class PackTap(Protocol):
    """Called in the order in which a layer packs."""

    def packed(self, make: Callable[[], T]) -> T:
        """What ``make`` packs, a ``PackedLinear`` of the C++ kernels, or the recorded one."""

    def noted(self, make: Callable[[], T]) -> T:
        """What ``make`` makes of a checkpoint's integers for the kernels, or a stand-in for it."""

    def kept(self, param: Any, value: Tensor) -> None:
        """The layer keeps the value of this parameter."""


_tap: ContextVar[PackTap | None] = ContextVar("pack tap", default=None)


@contextmanager
def tapped(tap: PackTap) -> Iterator[None]:
    """Within it, what this thread packs goes through ``tap``."""
    token = _tap.set(tap)
    try:
        yield
    finally:
        _tap.reset(token)


def packed(make: Callable[[], T]) -> T:
    """``make()``, or what was recorded of it."""
    tap = _tap.get()
    return make() if tap is None else tap.packed(make)


def noted(make: Callable[[], T]) -> T:
    """As ``packed``, of integers before they are packed."""
    tap = _tap.get()
    return make() if tap is None else tap.noted(make)


def kept(param: Any, value: Tensor) -> None:
    """A layer keeps the value of a parameter."""
    if (tap := _tap.get()) is not None:
        tap.kept(param, value)
