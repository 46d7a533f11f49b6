"""WaitingQueue and the scheduling policies, as functions that sort the waiting requests."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from radixlm.base.errors import ConfigError
from radixlm.memory.prefix.base import PrefixCache
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.request import Request

# with more waiting requests than this, prefix-aware policies cost more than they save
MAX_MATCHED = 128

SortWaiting = Callable[[list[Request], PrefixCache, float], None]


def _fcfs(waiting: list[Request], cache: PrefixCache, now_s: float) -> None:
    """Oldest first: the list is in this order."""


def _longest_output(waiting: list[Request], cache: PrefixCache, now_s: float) -> None:
    waiting.sort(key=lambda r: -r.max_new_tokens)


def _shuffled(waiting: list[Request], cache: PrefixCache, now_s: float) -> None:
    random.shuffle(waiting)


def _longest_prefix(waiting: list[Request], cache: PrefixCache, now_s: float) -> None:
    if len(waiting) <= MAX_MATCHED:
        hits = {r.rid: cache.peek(r.ids[: r.prefill_len - 1], r.namespace) for r in waiting}
        waiting.sort(key=lambda r: -hits[r.rid])


def _depth_first(waiting: list[Request], cache: PrefixCache, now_s: float) -> None:
    """Depth first, by the weight of subtrees: a page weighs the waiting requests that share it."""
    if len(waiting) > MAX_MATCHED:
        return
    paths = {
        r.rid: cache.match(r.ids[: r.prefill_len - 1], r.namespace).pages.tolist() for r in waiting
    }
    weight = Counter(page for path in paths.values() for page in path)
    waiting.sort(key=lambda r: [(-weight[page], page) for page in paths[r.rid]] or [(0, 0)])


POLICIES: dict[str, SortWaiting] = {
    "fcfs": _fcfs,
    "lpm": _longest_prefix,
    "dfs-weight": _depth_first,
    "lof": _longest_output,
    "random": _shuffled,
}


class FairShare:
    """Fair share among users by virtual counters (arXiv:2401.00588): the user served least is next.
    A user who comes back after a pause gets no credit for it."""

    def __init__(self) -> None:
        self._num_served: Counter[str | None] = Counter()

    def arrive(self, key: str | None, waiting: Sequence[Request]) -> None:
        """``key`` waits again: raise its counter to the lowest of the users who wait."""
        others = {r.wire.fair_key for r in waiting}
        if key not in others and others:
            lowest = min(self._num_served[k] for k in others)
            self._num_served[key] = max(self._num_served[key], lowest)

    def serve(self, key: str | None) -> None:
        """Count a request of ``key`` that was admitted."""
        self._num_served[key] += 1

    def sort(self, waiting: list[Request]) -> list[Request]:
        """Each user's requests keep their order; users alternate."""
        num_before: Counter[str | None] = Counter()
        ranked: list[tuple[int, int, Request]] = []
        for index, request in enumerate(waiting):
            key = request.wire.fair_key
            ranked.append((self._num_served[key] + num_before[key], index, request))
            num_before[key] += 1
        ranked.sort(key=lambda entry: entry[:2])
        return [request for _, _, request in ranked]


class WaitingQueue:
    """The waiting requests. Retracted ones come first; priorities age so that none starves."""

    def __init__(self, limits: Limits, prefix_cache: PrefixCache) -> None:
        if limits.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"--schedule-policy {limits.policy!r}: choose one of {known}")
        self._sort, self._limits = POLICIES[limits.policy], limits
        self._prefix_cache = prefix_cache
        self._waiting: list[Request] = []
        self._fair_share = FairShare()
        self.num_quarantined = 0  # waiting requests that are quarantined

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        if self._limits.fair:
            self._fair_share.arrive(request.wire.fair_key, self._waiting)
        self._waiting.append(request)
        self.num_quarantined += request.wire.is_quarantined

    def start(self, request: Request) -> None:
        """The request leaves the queue for a slot."""
        self.remove(request)
        if self._limits.fair:
            self._fair_share.serve(request.wire.fair_key)

    def push_front(self, request: Request) -> None:
        """Put a retracted request in front."""
        self._waiting.insert(0, request)
        self.num_quarantined += request.wire.is_quarantined

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)
        self.num_quarantined -= request.wire.is_quarantined

    def priority(self, request: Request, now_s: float) -> float:
        """Higher is sooner; one more for every ``aging_s`` of waiting."""
        sign = -1 if self._limits.low_values_first else 1
        aged = max(0.0, now_s - request.queued_s) / self._limits.aging_s
        return sign * request.wire.priority + aged

    def in_order(self, now_s: float) -> list[Request]:
        """A copy sorted by policy, then by fair share, then with retracted requests in front, then
        by priority (the later sort counts more: who was preempted does not go first)."""
        waiting = list(self._waiting)
        self._sort(waiting, self._prefix_cache, now_s)
        if self._limits.fair:
            waiting = self._fair_share.sort(waiting)
        waiting.sort(key=lambda r: r.retractions == 0)
        if self._limits.priorities:
            waiting.sort(key=lambda r: -self.priority(r, now_s))
        return waiting
