"""ForcedRetraction: retractions without need, to test what comes after them."""

from __future__ import annotations

import sys

from radixlm.admission_order.ordered_queue import OrderedQueue
from radixlm.admission_order.preemption import PriorityPreemption
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request


class ForcedRetraction(PriorityPreemption):
    """Retracts the least important of several requests that run, every ``interval`` steps. While
    more than ``max_running`` run, no other starts."""

    def __init__(
        self, planner: Planner, queue: OrderedQueue, interval: int, max_running: int = sys.maxsize
    ) -> None:
        super().__init__(planner, queue)
        self._interval, self._num_steps, self._max_running = interval, 0, max_running
        self._victim: Request | None = None

    def sort(self, waiting: list[Request]) -> None:
        super().sort(waiting)
        if len(self._planner.running) > self._max_running:
            waiting.clear()

    def begin_step(self) -> None:
        """While a step in flight computes the request, leave it out of the next."""
        super().begin_step()
        planner = self._planner
        self._num_steps += 1
        if self._victim is None and self._num_steps % self._interval == 0:
            decoding = [r for r in planner.running if not r.finish and not r.is_prefilling]
            if len(planner.running) > 1:
                self._victim = planner.least_important(decoding)
        victim = self._victim
        if victim is None or planner.held is not None:
            return
        if victim.inflight and not victim.finish:
            planner.held = victim
            return
        self._victim = None
        if not victim.finish and any(request is victim for request in planner.running):
            planner.retract(victim)
