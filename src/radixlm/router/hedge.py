"""Hedging: a stream whose first token is late is asked of a second worker too, and the first to
answer is heard. Opt-in by --hedge; requests with a seed get the text that they would have had."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from radixlm.router.data_routes import DATA_ROUTES
from radixlm.router.dispatch import Dispatch
from radixlm.router.exchange import Exchange, WorkerFailure
from radixlm.router.retry import BUSY, RETRIED, Failure
from radixlm.router.series import Counter
from radixlm.router.worker import Worker

QUANTILE = 0.95
MIN_SEEN = 20  # first tokens of a length class before any is called late
KEPT = 128
MAX_SAVED = 10.0  # hedges that a quiet time may save up


class Hedger:
    """When a first token is late, and whether one more hedge is allowed. Length classes are powers
    of two of the prompt's tokens."""

    def __init__(self, fraction: float, counter: Counter) -> None:
        """``fraction``: of streams that may be hedged. ``counter``: of hedges by result."""
        self.counter = counter
        self._fraction, self._saved = fraction, 0.0
        self._seen: dict[int, deque[float]] = {}
        self._late_s: dict[int, float] = {}

    def late_s(self, length: int) -> float | None:
        """The p95 of times to a first token, in seconds; None: too few were seen."""
        self._saved = min(MAX_SAVED, self._saved + self._fraction)
        return self._late_s.get(length)

    def take(self) -> bool:
        """Use up one hedge, if it is allowed."""
        if self._saved < 1.0 - 1e-9:
            return False
        self._saved -= 1.0
        return True

    def saw(self, length: int, seconds: float) -> None:
        """A first token came after ``seconds``."""
        seen = self._seen.setdefault(length, deque(maxlen=KEPT))
        seen.append(seconds)
        if len(seen) >= MIN_SEEN:
            self._late_s[length] = sorted(seen)[int(QUANTILE * len(seen))]


class Leg:
    """One of the two requests. Its task ends with the first bytes of the body, or with an answer
    that is none to a stream."""

    def __init__(self, dispatch: Dispatch, worker: Worker, extra: Mapping[str, Any]) -> None:
        self.worker, self._dispatch = worker, dispatch
        self._cost = dispatch.charge(worker)
        self.task = asyncio.ensure_future(self._open(extra))
        self.task.add_done_callback(_seen)

    async def _open(self, extra: Mapping[str, Any]) -> Exchange:
        exchange = await self._dispatch.open(self.worker, extra)
        try:
            await exchange.begun()
        except BaseException:
            exchange.close()
            raise
        return exchange

    @property
    def is_good(self) -> bool:
        """Whether it has a stream to give."""
        return self.task.exception() is None and self.task.result().status == 200

    def end(self) -> None:
        """Drop what is not complete, so that the worker aborts it."""
        is_open = self.task.done() and not self.task.cancelled() and not self.task.exception()
        self.task.cancel()
        self._dispatch.discharge(self.worker, self._cost, self.task.result() if is_open else None)


def _seen(task: asyncio.Future[Exchange]) -> None:
    """The error of a leg that lost concerns nobody."""
    if not task.cancelled():
        task.exception()


class HedgedDispatch(Dispatch):
    """Streams, until their first bytes, by up to two workers."""

    async def send(self, worker: Worker, extra: Mapping[str, Any]) -> Failure | None:
        is_held = self.shared.holder(self.call) is not None
        if not self.is_stream or self.stream is not None or is_held:
            return await super().send(worker, extra)
        began_s, length = time.monotonic(), self.call.num_prompt_tokens.bit_length()
        legs = [Leg(self, worker, extra)]
        try:
            leg = await self._race(legs, extra, self.gateway.hedger.late_s(length))
            self.call.worker = leg.worker
            if len(legs) > 1:
                self.gateway.hedger.counter.inc("lost" if leg is legs[0] else "won")
                legs.remove(leg)
                legs.pop().end()
                legs.append(leg)
            if leg.is_good:
                self.gateway.hedger.saw(length, time.monotonic() - began_s)
            return await self._answer(leg.task.result(), leg.worker)
        except WorkerFailure as error:
            return self._lost(leg.worker, error)
        finally:
            for leg in legs:
                leg.end()

    async def _race(self, legs: list[Leg], extra: Mapping[str, Any], late_s: float | None) -> Leg:
        """The leg to listen to. A second one is added to ``legs`` if the first is late."""
        first = legs[0]
        await asyncio.wait((first.task,), timeout=late_s)
        second = None if first.task.done() else await self._second(extra)
        if second is None:
            await asyncio.wait((first.task,))
            return first
        legs.append(second)
        tasks = (first.task, second.task)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner, other = (first, second) if first.task in done else (second, first)
        if not winner.is_good:
            await asyncio.wait((other.task,))
            if other.is_good:
                self._failed(winner)
                return other
        return winner

    async def _second(self, extra: Mapping[str, Any]) -> Leg | None:
        """The same request to a worker that was not asked yet, if that is allowed."""
        if not self._untried(self.worker_type) or not self.gateway.hedger.take():
            return None
        worker = await self.choose(self.worker_type)
        return None if isinstance(worker, Failure) else Leg(self, worker, extra)

    def _failed(self, leg: Leg) -> None:
        """Tell of a leg that failed while the other one answered."""
        error = leg.task.exception()
        if isinstance(error, WorkerFailure):
            self._blame(leg.worker, error)
            return
        status = leg.task.result().status
        outcome = "busy" if status in BUSY else "error" if status in RETRIED else "client"
        self.gateway.health.reported(leg.worker, outcome)


def attach(gateway: Any) -> None:
    """Hedge streams if --hedge is set; pairs of prefill and decode workers are not hedged."""
    if not gateway.options.hedge:
        return
    counter = gateway.metrics.counter(
        "radix_router_hedges_total", "Streams asked of a second worker, by its result.", ("result",)
    )
    gateway.hedger = Hedger(gateway.options.hedge_fraction, counter)
    for path in DATA_ROUTES:
        gateway.dispatcher.kinds.setdefault(path, HedgedDispatch)
