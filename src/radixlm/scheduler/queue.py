"""WaitingQueue: the requests without a slot."""

from collections.abc import Iterator, Sequence

from radixlm.scheduler.request import Request


class WaitingQueue:
    """The oldest is next, and retracted ones come first; ``admission_order`` knows other orders."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self.num_quarantined = 0  # waiting requests that are quarantined

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting.append(request)
        self.num_quarantined += request.wire.is_quarantined

    def start(self, request: Request) -> None:
        """The request leaves the queue for a slot."""
        self._take(request, is_served=True)

    def push_front(self, request: Request) -> None:
        """Put a retracted request in front."""
        self._waiting.insert(0, request)
        self.num_quarantined += request.wire.is_quarantined

    def remove(self, request: Request) -> None:
        """The request leaves the queue without having been served."""
        self._take(request, is_served=False)

    def _take(self, request: Request, *, is_served: bool) -> None:
        self._waiting.remove(request)
        self.num_quarantined -= request.wire.is_quarantined

    def outranked_by(self, request: Request) -> Request | None:
        """Who leaves a full queue for a request."""
        return None

    def in_order(self, now_s: float, running: Sequence[Request]) -> list[Request]:
        """A copy, the next to be admitted first."""
        return sorted(self._waiting, key=lambda r: not r.retractions and not len(r.dropped_output))
