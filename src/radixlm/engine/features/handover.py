"""The prefill side of pairs of servers: tells the ranks which rooms' requests are here, so that a
decode server knows whether to wait. Pages get there as a tier's (``page_arrivals.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixlm.engine.features.arrival_groups import PagePort
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.tiers.base import Room


class HandoverFeature(Feature):
    """Hooks arrive, release, stats; ``bind`` first, with each scheduler. ``has_rooms``: not on a
    decode server."""

    def __init__(self, has_rooms: bool, figures: Callable[[], dict[str, float]]) -> None:
        self._has_rooms, self._figures = has_rooms, figures
        self._open: dict[str, tuple[int, int]] = {}  # attention group and room by request id
        self._ports: Sequence[PagePort] = ()

    def bind(self, ports: Sequence[PagePort]) -> None:
        """Serve a scheduler, which begins without requests; ``ports``: of its attention groups."""
        self._ports = ports
        for group, room in self._open.values():
            self._tell(group, room, is_open=False)
        self._open.clear()

    def arrive(self, request: Request) -> bool:
        hint = request.wire.hint
        if self._has_rooms and hint is not None:
            group, room = hint.replica(len(self._ports)), hint.bootstrap_room
            self._open[request.rid] = group, room
            self._tell(group, room, is_open=True)
        return False

    def release(self, request: Request) -> None:
        if (found := self._open.pop(request.rid, None)) is not None:
            self._tell(*found, is_open=False)

    def _tell(self, group: int, room: int, *, is_open: bool) -> None:
        self._ports[group].send(Room(-1, room, is_open))

    def stats(self) -> dict[str, float]:
        return {f"peer_{name}": value for name, value in self._figures().items()}
