"""FairShare: turns of users, and of their calls."""

from collections import Counter
from collections.abc import Callable, Container

from radixlm.scheduler.request import Request

# users or calls whose turns are remembered; beyond it only of those that wait
MAX_COUNTERS = 16_384


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
