"""bucket: each worker has a range of prompt lengths."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy, least
from radixlm.router.policies.cache_aware import prompt_span
from radixlm.router.worker import Worker

FIRST_BOUND = 4096  # bytes; the ranges divide it before anything is known
MAX_LENGTHS = 10_000


class Bucket(Policy):
    """Ranges such that each worker gets about the same work, from the lengths of recent prompts in
    bytes. One worker much busier than another (as in cache_aware): the least loaded."""

    name = "bucket"

    def __init__(self, balance_abs: int, balance_rel: float, interval_s: float) -> None:
        """``interval_s``: how often the ranges are adjusted, and how long a length is recent."""
        self._abs, self._rel, self._interval_s = balance_abs, balance_rel, interval_s
        self._lengths: deque[tuple[float, int]] = deque(maxlen=MAX_LENGTHS)
        self._recent: list[int] = []  # sorted, as of the last adjustment
        self._bounds: dict[int, list[int]] = {}  # number of workers -> ends of all ranges but one
        self._adjusted_s = time.monotonic()
        self._places: dict[str, int] = {}  # worker id -> order of joining

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        _, length = prompt_span(call)
        self._lengths.append((time.monotonic(), length))
        loads = [worker.num_inflight for worker in workers]
        low, high = min(loads), max(loads)
        if high - low > self._abs and high > self._rel * low:
            return least(workers)
        bounds = self._bounds.get(len(workers))
        if bounds is None:
            bounds = self._bounds[len(workers)] = self._ranges(len(workers))
        ordered = sorted(workers, key=lambda worker: self._places.get(worker.id, 0))
        # several where a length is so common that it fills more than one range
        return least(ordered[bisect_left(bounds, length) : bisect_right(bounds, length) + 1])

    def joined(self, worker: Worker) -> None:
        self._places[worker.id] = max(self._places.values(), default=0) + 1

    def left(self, worker: Worker) -> None:
        self._places.pop(worker.id, None)

    def tick(self, now_s: float) -> None:
        if now_s - self._adjusted_s < self._interval_s:
            return
        self._adjusted_s = now_s
        while self._lengths and now_s - self._lengths[0][0] > self._interval_s:
            self._lengths.popleft()
        if self._lengths:  # an idle time says nothing of what comes next
            self._recent = sorted(length for _, length in self._lengths)
            self._bounds.clear()

    def _ranges(self, parts: int) -> list[int]:
        if not self._recent:
            return [FIRST_BOUND * part // parts for part in range(1, parts)]
        sums = list(accumulate(self._recent))
        cuts = (bisect_left(sums, sums[-1] * part / parts) for part in range(1, parts))
        return [self._recent[cut] for cut in cuts]
