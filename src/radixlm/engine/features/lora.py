"""Adapters where they meet the loop: a request is admitted when its adapter is loaded, and when the
adapters of the running requests are fewer than --max-loras-per-batch.

Requests of one adapter never block those of another: what is not ready is passed over. An adapter
that has waited for ``drain_s`` is next: no other one may join before it, and the running adapter
with the fewest requests gets no new ones until it has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixlm.base.errors import InvalidRequest
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request

if TYPE_CHECKING:  # it needs torch
    from radixlm.engine.adapters import AdapterLoader

DRAIN_S = 2.0


class LoraFeature(Feature):
    """Hooks arrive, ready, release."""

    def __init__(
        self,
        loader: AdapterLoader | None,
        max_adapters: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``loader`` None: adapters are off. ``max_adapters``: at a time; None: any number."""
        self._loader, self._max = loader, max_adapters
        self._clock = clock
        self._running: dict[int, set[str]] = {}  # request ids by adapter
        self._waiting_s: dict[int, float] = {}  # since when adapters wait for a place
        self._waiting_rids: dict[int, set[str]] = {}

    def arrive(self, request: Request) -> bool:
        adapter = request.wire.adapter
        if adapter is not None and self._loader is None:
            raise InvalidRequest("lora_path: start the server with --enable-lora", "lora_path")
        if adapter is not None and self._loader is not None:
            self._loader.is_ready(adapter.number)
        return False

    def ready(self, request: Request) -> bool:
        adapter = request.wire.adapter
        if adapter is None or self._loader is None:
            return True
        if not self._loader.is_ready(adapter.number):
            return False
        number = adapter.number
        if self._max is not None and not self._has_place(number, request.rid):
            self._waiting_s.setdefault(number, self._clock())
            self._waiting_rids.setdefault(number, set()).add(request.rid)
            return False
        self._stop_waiting(number, request.rid, is_admitted=True)
        self._running.setdefault(number, set()).add(request.rid)
        return True

    def _has_place(self, number: int, rid: str) -> bool:
        assert self._max is not None
        late = self._latecomer()
        running = self._running.get(number)
        if running is not None:
            return rid in running or late is None or number != self._leaver()
        return len(self._running) < self._max and late in (None, number)

    def _latecomer(self) -> int | None:
        """The adapter that has waited longest, if that is too long."""
        if not self._waiting_s:
            return None
        number = min(self._waiting_s, key=self._waiting_s.__getitem__)
        return number if self._clock() - self._waiting_s[number] >= DRAIN_S else None

    def _leaver(self) -> int:
        """The running adapter that makes room."""
        return min(self._running, key=lambda number: (len(self._running[number]), number))

    def _stop_waiting(self, number: int, rid: str, is_admitted: bool = False) -> None:
        rids = self._waiting_rids.get(number, set())
        rids.discard(rid)
        if is_admitted or not rids:
            self._waiting_s.pop(number, None)
        if not rids:
            self._waiting_rids.pop(number, None)

    def release(self, request: Request) -> None:
        adapter = request.wire.adapter
        if adapter is None:
            return
        self._stop_waiting(adapter.number, request.rid)
        running = self._running.get(adapter.number)
        if running is not None:
            running.discard(request.rid)
            if not running:
                del self._running[adapter.number]
