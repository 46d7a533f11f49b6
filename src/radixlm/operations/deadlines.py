"""RequestDeadlines: requests end that wait or run for too long."""

from __future__ import annotations

from radixlm.scheduler.loop import Scheduler
from radixlm.scheduler.request import Request
from radixlm.wire.replies import Finish


class RequestDeadlines:
    """Of one scheduler, by its limits and by what requests ask for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._timed: dict[str, Request] = {}  # requests with a deadline

    def add(self, request: Request) -> None:
        """A request waits."""
        wire = request.wire
        if wire.deadline_s or wire.queue_deadline_s or self._scheduler.limits.running_s:
            self._timed[wire.rid] = request

    def expire(self, now_s: float) -> None:
        """End waiting and running requests whose time is over."""
        scheduler = self._scheduler
        limit_s = scheduler.limits.running_s
        for rid, request in list(self._timed.items()):
            wire, began_s = request.wire, request.started_s
            if request.finish is not None:
                del self._timed[rid]
            elif wire.deadline_s and now_s > wire.deadline_s:
                late = Finish("abort", message="request timed out", status=408)
                scheduler.end_request(request, late)
            elif not began_s and wire.queue_deadline_s and now_s > wire.queue_deadline_s:
                self._end_late(request, "waiting", scheduler.retry_after_s())
            elif limit_s and not request.is_waiting and now_s > began_s + limit_s:
                self._end_late(request, "running")

    def _end_late(self, request: Request, state: str, retry_after_s: float | None = None) -> None:
        message = f"Request {state} timeout reached."
        late = Finish("error", message=message, status=503, retry_after_s=retry_after_s)
        self._scheduler.end_request(request, late)
