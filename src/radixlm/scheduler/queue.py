"""WaitingQueue and the scheduling policies, as functions that sort the waiting requests."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from radixlm.base.errors import ConfigError
from radixlm.memory.prefix.base import PrefixCache
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.request import Request
from radixlm.wire.replies import KEY_BOUNDS

# with more waiting requests than this, prefix-aware policies cost more than they save
MAX_MATCHED = 128
# users or calls whose turns are remembered; beyond it only of those that wait
MAX_COUNTERS = 16_384

# sorts the waiting requests, by the cache, the running ones and the time in seconds
SortWaiting = Callable[[list[Request], PrefixCache, Sequence[Request], float], None]


def _fcfs(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Oldest first: the list is in this order."""


def _longest_output(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    waiting.sort(key=lambda r: -r.max_new_tokens)


def _shuffled(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    random.shuffle(waiting)


def _longest_prefix(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    if len(waiting) <= MAX_MATCHED:
        hits = {r.rid: cache.peek(r.ids[: r.prefill_len - 1], r.namespace) for r in waiting}
        waiting.sort(key=lambda r: -hits[r.rid])


def _depth_first(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Depth first, by the weight of subtrees: a page weighs the waiting requests that share it."""
    if len(waiting) > MAX_MATCHED:
        return
    paths = {
        r.rid: cache.match(r.ids[: r.prefill_len - 1], r.namespace).pages.tolist() for r in waiting
    }
    weight = Counter(page for path in paths.values() for page in path)
    waiting.sort(key=lambda r: [(-weight[page], page) for page in paths[r.rid]] or [(0, 0)])


def _routing_key(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first whose routing key most running requests have; equal keys together."""
    counts = Counter(r.wire.routing_key or "" for r in running)
    del counts[""]
    if counts:
        waiting.sort(key=lambda r: (-counts[key := r.wire.routing_key or ""], key))


def count_keys(running: Iterable[Request], waiting: Iterable[Request]) -> dict[str, int]:
    """How many routing keys have how many requests: "running" (all keys that run), "running 2" (two
    running requests), "all 3", "all 5" (running and waiting: 4 or 5), by KEY_BOUNDS."""
    keys = Counter(key for request in running if (key := request.wire.routing_key))
    found = Counter({"running": len(keys)} if keys else {})
    found.update(f"running {KEY_BOUNDS[bisect_left(KEY_BOUNDS, n)]}" for n in keys.values())
    keys.update(key for request in waiting if (key := request.wire.routing_key))
    found.update(f"all {KEY_BOUNDS[bisect_left(KEY_BOUNDS, n)]}" for n in keys.values())
    return dict(found)


def _uncached(request: Request, cache: PrefixCache) -> int:
    """The tokens that its prompt step computes."""
    known = request.ids[: request.prefill_len - 1]
    return request.prefill_len - cache.peek(known, request.namespace)


def _shortest_prefill(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first of whose prompts the cache lacks least."""
    if len(waiting) <= MAX_MATCHED:
        waiting.sort(key=lambda r: _uncached(r, cache))


def _response_ratio(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first that have waited longest for each token that the cache lacks, so that short
    prompts go first and long ones do not starve (highest response ratio next)."""
    if len(waiting) <= MAX_MATCHED:
        waiting.sort(key=lambda r: (r.queued_s - now_s) / _uncached(r, cache))


POLICIES: dict[str, SortWaiting] = {
    "fcfs": _fcfs,
    "lpm": _longest_prefix,
    "dfs-weight": _depth_first,
    "lof": _longest_output,
    "random": _shuffled,
    "routing-key": _routing_key,
    "shortest-prefill-first": _shortest_prefill,
    "hrrn": _response_ratio,
}


class FairShare:
    """Fair share by virtual counters (arXiv:2401.00588) among users, or among calls: whoever was
    served least is next. Who comes back after a pause gets no credit for it."""

    def __init__(self, key_of: Callable[[Request], str | None]) -> None:
        self._key_of = key_of
        self._num_served: Counter[str | None] = Counter()
        self._num_waiting: Counter[str | None] = Counter()

    def has_others(self, keys: Container[str | None]) -> bool:
        """Whether requests of other keys than ``keys`` wait."""
        return any(key not in keys for key in self._num_waiting)

    def arrive(self, request: Request) -> None:
        """``request`` waits. If nothing else of its key does, raise the key's counter to the lowest
        of those that wait."""
        key = self._key_of(request)
        if key not in self._num_waiting and self._num_waiting:
            lowest = min(self._num_served[k] for k in self._num_waiting)
            self._num_served[key] = max(self._num_served[key], lowest)
        self._num_waiting[key] += 1
        if len(self._num_served) > MAX_COUNTERS:
            kept = {k: self._num_served[k] for k in self._num_waiting}
            self._num_served = Counter(kept)

    def leave(self, request: Request, *, is_served: bool) -> None:
        """``request`` waits no more; ``is_served``: it was admitted."""
        key = self._key_of(request)
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key]
        self._num_served[key] += is_served

    def sort(self, waiting: list[Request]) -> list[Request]:
        """Each key's requests keep their order; keys alternate."""
        if len(self._num_waiting) == 1:
            return waiting
        num_before: Counter[str | None] = Counter()
        ranked: list[tuple[int, int, Request]] = []
        for index, request in enumerate(waiting):
            key = self._key_of(request)
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
        # calls take turns, and users before them
        self._shares = (
            FairShare(lambda request: request.wire.call_key),
            FairShare(lambda request: request.wire.fair_key),
        )
        self.num_quarantined = 0  # waiting requests that are quarantined

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def has_other_calls(self, keys: Container[str | None]) -> bool:
        """Whether requests of other calls than ``keys`` wait."""
        return self._shares[0].has_others(keys)

    def push(self, request: Request) -> None:
        for share in self._shares if self._limits.fair else ():
            share.arrive(request)
        self._waiting.append(request)
        self.num_quarantined += request.wire.is_quarantined

    def start(self, request: Request) -> None:
        """The request leaves the queue for a slot."""
        self._take(request, is_served=True)

    def push_front(self, request: Request) -> None:
        """Put a retracted request in front."""
        for share in self._shares if self._limits.fair else ():
            share.arrive(request)
        self._waiting.insert(0, request)
        self.num_quarantined += request.wire.is_quarantined

    def remove(self, request: Request) -> None:
        """The request leaves the queue without having been served."""
        self._take(request, is_served=False)

    def _take(self, request: Request, *, is_served: bool) -> None:
        self._waiting.remove(request)
        for share in self._shares if self._limits.fair else ():
            share.leave(request, is_served=is_served)
        self.num_quarantined -= request.wire.is_quarantined

    def priority(self, request: Request, now_s: float) -> float:
        """Higher is sooner; one more for every ``aging_s`` of waiting."""
        aged = max(0.0, now_s - request.queued_s) / self._limits.aging_s
        return self._limits.rank(request.wire.priority) + aged

    def outranked_by(self, request: Request) -> Request | None:
        """Who leaves a full queue for a request of a higher priority: of the lowest priority, the
        latest; none that has run before."""
        if not self._limits.priorities:
            return None
        rank = self._limits.rank
        fresh = [
            r
            for r in reversed(self._waiting)
            if not (r.num_output or r.retractions or r.wire.is_quarantined)
            and rank(r.wire.priority) < rank(request.wire.priority)
        ]
        return min(fresh, key=lambda r: rank(r.wire.priority), default=None)

    def in_order(self, now_s: float, running: Sequence[Request]) -> list[Request]:
        """A copy sorted by policy, then by fair share, then with retracted requests in front, then
        by priority (the later sort counts more: who was preempted does not go first)."""
        waiting = list(self._waiting)
        self._sort(waiting, self._prefix_cache, running, now_s)
        for share in self._shares if self._limits.fair else ():
            waiting = share.sort(waiting)
        waiting.sort(key=lambda r: not r.retractions and not len(r.dropped_output))
        if self._limits.priorities:
            waiting.sort(key=lambda r: -self.priority(r, now_s))
        return waiting
