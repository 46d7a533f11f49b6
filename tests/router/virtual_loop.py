"""An event loop whose clock jumps to the next timer when nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never waits: the time that the loop would sleep is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("the test waits for something that never comes")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio in simulated time; for code without sockets. ``time`` starts at 1000 s."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """The simulated time in seconds."""
        return 1000.0 + self._jump.now_s


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in simulated time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
