"""PriorityPreemption: running requests that give way to waiting ones."""

from __future__ import annotations

from collections import Counter

from radixlm.admission_order.ordered_queue import OrderedQueue
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item

LARGE_CALLS = 8  # a call that holds one of so many parts of the slots gives way to others


class PriorityPreemption:
    """Retracts requests of a planner, one a step: the least important for a much more important
    one, the latest of a large call for one of another call.

    blocked  the request that found no room in the last step
    """

    def __init__(self, planner: Planner, queue: OrderedQueue) -> None:
        self._planner, self._queue, self._limits = planner, queue, planner.limits
        self.blocked: Request | None = None
        self._preemptor: Request | None = None  # a victim was retracted for it

    def sort(self, waiting: list[Request]) -> None:
        """Who got a victim's place goes first: else a victim of great age would take it back."""
        if self._preemptor is not None:
            waiting.sort(key=lambda request: request is not self._preemptor)
            self._preemptor = None

    def plan_turn(self, prefills: list[Item], now_s: float) -> bool:
        """Where a large call holds many slots, start a request of a call that has none in a step of
        its own, if need be in place of the latest of the large call. True if one was started."""
        planner = self._planner
        if not self._limits.fair or not self._queue or not planner.running:
            return False
        counts = Counter(request.wire.call_key for request in planner.running)
        ((largest, count),) = counts.most_common(1)
        is_large = count > 1 and LARGE_CALLS * count >= self._limits.max_running
        if not is_large or not self._queue.has_other_calls(counts):
            return False
        waiting = self._queue.in_order(now_s, planner.running)
        others = (r for r in waiting if r.wire.call_key not in counts)
        free = (r for r in others if not r.wire.is_quarantined)
        request = next((r for r in free if planner.is_ready(r)), None)
        if request is None:
            return False
        if not planner.try_admit(request):
            of_call = [r for r in planner.running if r.wire.call_key == largest]
            victim = next((r for r in reversed(of_call) if not r.finish), None)
            if victim is None:
                return False
            if self._limits.priorities and self._rank_above(victim, request) > 0:
                return False
            self._preemptor = request
            if victim.inflight:
                planner.held = planner.held or victim  # retracted when its step has ended
                return False
            planner.retract(victim)
            if not planner.try_admit(request):
                return False
        left = min(self._limits.step_tokens, self._limits.max_prefill_tokens)
        planner.start(request, prefills, left, now_s)
        return bool(prefills)

    def _rank_above(self, request: Request, other: Request) -> int:
        """By how much ``request`` is more important than ``other``."""
        return self._limits.rank(request.wire.priority) - self._limits.rank(other.wire.priority)

    def begin_step(self) -> None:
        """Retract the least important running request for a much more important one that found no
        room in the last step. While a step in flight computes the victim, leave it out of the next.

        This comes before the decodes are planned, since what is planned is in flight."""
        planner = self._planner
        request, self.blocked, planner.held = self.blocked, None, None
        if not self._limits.priorities:
            return
        if request is None or not any(waiting is request for waiting in self._queue):
            return
        victim = planner.least_important([r for r in planner.running if not r.finish])
        if victim is None:
            return
        if self._rank_above(request, victim) <= self._limits.preemption_threshold:
            return
        if victim.inflight:
            planner.held, self.blocked = victim, request
        else:
            planner.retract(victim)
            self._preemptor = request
