"""OrderedQueue: the waiting requests by policy, fair share and priority."""

from __future__ import annotations

from collections.abc import Container, Sequence

from radixlm.admission_order.fair_share import FairShare
from radixlm.admission_order.policies import POLICIES
from radixlm.base.errors import ConfigError
from radixlm.memory.prefix.base import PrefixCache
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.queue import WaitingQueue
from radixlm.scheduler.request import Request


class OrderedQueue(WaitingQueue):
    """Retracted requests come first; priorities age so that none starves."""

    def __init__(self, limits: Limits, prefix_cache: PrefixCache) -> None:
        super().__init__()
        if limits.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"--schedule-policy {limits.policy!r}: choose one of {known}")
        self._sort, self._limits = POLICIES[limits.policy], limits
        self._prefix_cache = prefix_cache
        # calls take turns, and users before them
        self._calls = FairShare(lambda request: request.wire.call_key)
        users = FairShare(lambda request: request.wire.fair_key)
        self._shares = (self._calls, users) if limits.fair else ()

    def has_other_calls(self, keys: Container[str | None]) -> bool:
        """Whether requests of other calls than ``keys`` wait."""
        return self._calls.has_others(keys)

    def push(self, request: Request) -> None:
        for share in self._shares:
            share.arrive(request)
        super().push(request)

    def push_front(self, request: Request) -> None:
        """Put a retracted request in front."""
        for share in self._shares:
            share.arrive(request)
        super().push_front(request)

    def _take(self, request: Request, *, is_served: bool) -> None:
        super()._take(request, is_served=is_served)
        for share in self._shares:
            share.leave(request, is_served=is_served)

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
        for share in self._shares:
            waiting = share.sort(waiting)
        waiting.sort(key=lambda r: not r.retractions and not len(r.dropped_output))
        if self._limits.priorities:
            waiting.sort(key=lambda r: -self.priority(r, now_s))
        return waiting
