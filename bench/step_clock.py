"""Wall and CPU time of the parts of a scheduler step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PARTS = ("plan", "pack", "launch", "draw", "read", "commit", "send")


class Clock:
    """Wall and CPU time of one part of each step."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._wall_s = self._cpu_s = 0.0

    def timed(self, call: Callable[..., Any], outer: Clock | None = None) -> Callable[..., Any]:
        """Wrap `call`: add its time to this clock and subtract it from `outer`."""

        def run(*args: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            result = call(*args)
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            self.add(wall_s, cpu_s)
            if outer is not None:
                outer.add(-wall_s, -cpu_s)
            return result

        return run

    def add(self, wall_s: float, cpu_s: float) -> None:
        self._wall_s += wall_s
        self._cpu_s += cpu_s

    def lap(self) -> None:
        """End the current step: store its times and start again from zero."""
        self.wall_s.append(self._wall_s)
        self.cpu_s.append(self._cpu_s)
        self._wall_s = self._cpu_s = 0.0
