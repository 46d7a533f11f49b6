"""The prefill side of pairs of servers: tells the outbox which rooms' requests are here, so that a
decode server knows whether to wait. Pages get there as a tier's (``page_arrivals.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request


class Rooms(Protocol):
    """The peer tier of a prefill server."""

    def open_room(self, room: int) -> None: ...
    def close_room(self, room: int) -> None: ...


class HandoverFeature(Feature):
    """Hooks arrive, release, stats. ``rooms``: None on a decode server, which has none."""

    def __init__(self, rooms: Rooms | None, figures: Callable[[], dict[str, float]]) -> None:
        self._rooms, self._figures = rooms, figures
        self._open: dict[str, int] = {}  # room by request id

    def arrive(self, request: Request) -> bool:
        hint = request.wire.hint
        if self._rooms is not None and hint is not None:
            self._open[request.rid] = hint.bootstrap_room
            self._rooms.open_room(hint.bootstrap_room)
        return False

    def release(self, request: Request) -> None:
        room = self._open.pop(request.rid, None)
        if self._rooms is not None and room is not None:
            self._rooms.close_room(room)

    def forget(self) -> None:
        """Another scheduler begins without requests."""
        for room in self._open.values():
            assert self._rooms is not None
            self._rooms.close_room(room)
        self._open.clear()

    def stats(self) -> dict[str, float]:
        return {f"peer_{name}": value for name, value in self._figures().items()}
