"""Percentiles of times over the last minutes, in buckets that grow by a constant factor."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

PER_OCTAVE: Final = 16  # a bucket is 4.4 % wide, so a percentile is at most 2.2 % off
LEAST_S: Final = 1e-6  # what is shorter counts as this
MINUTE_S: Final = 60.0
MAX_MINUTES: Final = 60
QUANTILES: Final = (0.5, 0.95, 0.99)


class Histogram:
    """Times in seconds, one Counter of buckets for each minute that had some."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: deque[tuple[int, Counter[int]]] = deque()

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, ``count`` times."""
        minute = int(self._clock() / MINUTE_S)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
            while self._minutes[0][0] < minute - MAX_MINUTES:
                self._minutes.popleft()
        bucket = math.floor(PER_OCTAVE * math.log2(max(seconds, LEAST_S)))
        self._minutes[-1][1][bucket] += count

    def percentiles(
        self, minutes: int, quantiles: Sequence[float] = QUANTILES
    ) -> list[float] | None:
        """Seconds below which each share of the times lies, of the running minute and the
        ``minutes`` before it; None if there are none. At most 2.2 % off."""
        oldest = int(self._clock() / MINUTE_S) - minutes
        counts: Counter[int] = Counter()
        for minute, found in self._minutes:
            if minute >= oldest:
                counts.update(found)
        if not counts:
            return None
        buckets, total = sorted(counts.items()), counts.total()
        found_s: list[float] = []
        for quantile in quantiles:
            rank, seen = max(1, math.ceil(quantile * total)), 0
            for bucket, count in buckets:
                seen += count
                if seen >= rank:
                    found_s.append(2.0 ** ((bucket + 0.5) / PER_OCTAVE))
                    break
        return found_s
