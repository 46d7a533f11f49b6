"""--gc-warning-threshold-secs: warns about long pauses of the garbage collector."""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)


class GcWatch:
    """Warns about collections of this process that take longer than ``threshold_s``."""

    def __init__(self, threshold_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._threshold_s, self._clock = threshold_s, clock
        self._began_s = 0.0

    def install(self) -> None:
        """Start watching, unless the threshold is 0."""
        if self._threshold_s > 0:
            gc.callbacks.append(self)

    def remove(self) -> None:
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began_s = self._clock()
            return
        took_s = self._clock() - self._began_s
        if took_s > self._threshold_s:
            log.warning(
                "garbage collection of generation %d took %.3f s (%d objects); POST /freeze_gc "
                "exempts all live objects",
                info["generation"],
                took_s,
                info["collected"],
            )
