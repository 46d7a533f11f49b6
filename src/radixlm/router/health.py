"""Health: one state machine a worker, fed by checks and by what happens to requests.

joining -> ready <-> suspect    its breaker is open, or connections to it break
             ^  \\-> unhealthy   checks fail
             |_____|            and pass again
draining and gone are set by others; a worker that drains is not checked.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from radixlm.base.errors import TransferError
from radixlm.router.metrics import RouterMetrics
from radixlm.router.registry import Event, Registry
from radixlm.router.worker import State, Worker

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "error", "unreachable", "busy", "cut", "client"]
"""ok: a whole answer. error: 500, 502, 504. unreachable: no byte of an answer. busy: 429 or 503.
cut: ended amid the answer. client: another 4xx. busy and client are neither success nor failure."""

_BURST, _BURST_S = 3, 1.0  # so many broken connections in so many seconds: out at once
_FIRST_PROBE_S = 1.0
_SILENT_S = 10.0  # a worker with requests that sends nothing for so long is checked at once
_RECHECK_S = 5.0  # after a check without an answer
_LEARN_S = 30.0  # between two looks at a ready server's facts
TICK_S = 0.1


class Pulse:
    """What is known of one worker's health. Times are of the monotonic clock, in seconds."""

    __slots__ = (
        "breaks",
        "due_s",
        "heard_s",
        "is_checking",
        "last_failure_s",
        "num_bad",
        "num_failures",
        "num_good",
        "num_received",
        "num_trials",
        "out_s",
        "reopens_s",
    )

    def __init__(self, due_s: float) -> None:
        self.num_failures = 0  # in a row, of requests
        self.last_failure_s = 0.0
        self.num_trials = 0  # successes that a breaker still needs to close
        self.reopens_s = math.inf  # when an open breaker lets requests through again
        self.breaks: deque[float] = deque(maxlen=_BURST)  # times of broken connections
        self.num_bad = self.num_good = 0  # checks in a row
        self.due_s = due_s  # of the next check
        self.out_s = 0.0  # since when it is suspect or unhealthy
        self.is_checking = False
        self.num_received, self.heard_s = -1, 0.0  # pieces of answers, and when the last came


class Health:
    """Breakers and health checks of all workers."""

    def __init__(
        self,
        registry: Registry,
        metrics: RouterMetrics,
        num_received: Callable[[str], int] = lambda url: 0,
    ) -> None:
        """``num_received``: pieces of answers that have come from a worker's url."""
        self._num_received = num_received
        self.registry, self.options = registry, registry.options
        self.metrics = metrics
        self._pulses: dict[str, Pulse] = {}
        registry.listen(self._listen)

    def reported(self, worker: Worker, outcome: Outcome) -> None:
        """What became of a request that was sent to ``worker``."""
        pulse = self._pulses.get(worker.id)
        if pulse is None or outcome in ("client", "busy"):
            return
        self.metrics.breaker_outcome(worker, outcome == "ok")
        if outcome == "ok":
            pulse.num_failures = 0
            if pulse.num_trials:
                pulse.num_trials -= 1
                if not pulse.num_trials:
                    logger.info("worker %s: breaker closed", worker.name)
                    self.metrics.breaker_transition(worker, "half_open", "closed")
            return
        now_s = time.monotonic()
        if outcome != "error":
            self._broke(worker, pulse, now_s)
        if not self.options.disable_circuit_breaker:
            self._failed(worker, pulse, now_s)

    def tick(self) -> None:
        """Make the checks that are due; let requests through a breaker whose time is over."""
        now_s = time.monotonic()
        for worker in self.registry:
            pulse = self._pulses.get(worker.id)
            if pulse is None or worker.state is State.DRAINING:
                continue
            if worker.state is State.SUSPECT and now_s >= pulse.reopens_s:
                pulse.reopens_s = math.inf
                pulse.num_failures, pulse.num_trials = 0, self.options.cb_success_threshold
                self.registry.move(worker, State.READY, "breaker half open")
                self.metrics.breaker_transition(worker, "open", "half_open")
            if self._is_silent(worker, pulse, now_s):
                pulse.due_s = now_s
            if now_s >= pulse.due_s and not pulse.is_checking:
                self._look(worker, pulse, now_s)

    def _is_silent(self, worker: Worker, pulse: Pulse, now_s: float) -> bool:
        """Whether a ready worker has requests and sends nothing; told each
        ``_SILENT_S``."""
        if worker.state is not State.READY or worker.disable_health_check:
            return False
        num_received = self._num_received(worker.url)
        if not worker.num_inflight or num_received != pulse.num_received:
            pulse.num_received, pulse.heard_s = num_received, now_s
        is_silent = now_s - pulse.heard_s >= _SILENT_S
        if is_silent:
            pulse.heard_s = now_s
        return is_silent

    def _look(self, worker: Worker, pulse: Pulse, now_s: float) -> None:
        """Check a worker. Where checks are off only one that is out: how else would it return."""
        if worker.disable_health_check and worker.state is State.READY:
            pulse.due_s = now_s + _LEARN_S
            self.registry.spawn(self.registry.learn(worker))
        else:
            pulse.is_checking = True
            self.registry.spawn(self._check(worker, pulse))

    def _listen(self, event: Event, worker: Worker) -> None:
        if event == "joined":
            interval_s = float(self.options.health_check_interval_secs)
            if worker.disable_health_check:
                interval_s = min(interval_s, _LEARN_S)
            self._pulses[worker.id] = Pulse(time.monotonic() + interval_s * random.uniform(0.5, 1))
        elif event == "left":
            self._pulses.pop(worker.id, None)

    def _failed(self, worker: Worker, pulse: Pulse, now_s: float) -> None:
        """Count a failure; open the breaker at the limit, or at the first one while half open."""
        options = self.options
        if now_s - pulse.last_failure_s > options.cb_window_duration_secs:
            pulse.num_failures = 0
        pulse.num_failures += 1
        pulse.last_failure_s = now_s
        is_over = pulse.num_failures >= options.cb_failure_threshold
        if worker.state is State.READY and (pulse.num_trials or is_over):
            pulse.out_s = now_s
            pulse.reopens_s = now_s + options.cb_timeout_duration_secs
            was = "half_open" if pulse.num_trials else "closed"
            pulse.num_trials = 0
            self.metrics.breaker_transition(worker, was, "open")
            why = f"breaker open after {pulse.num_failures} failures"
            self.registry.move(worker, State.SUSPECT, why)

    def _broke(self, worker: Worker, pulse: Pulse, now_s: float) -> None:
        """A connection broke: out at the third in a second, else look at once."""
        pulse.breaks.append(now_s)
        if worker.state is not State.READY:
            return
        if len(pulse.breaks) == _BURST and now_s - pulse.breaks[0] <= _BURST_S:
            self._suspend(worker, pulse, f"{_BURST} broken connections within {_BURST_S:g} s")
        else:
            pulse.due_s = now_s

    def _suspend(self, worker: Worker, pulse: Pulse, why: str) -> None:
        """Out until a check passes."""
        pulse.reopens_s, pulse.num_bad = math.inf, 0
        pulse.out_s = time.monotonic()
        pulse.due_s = pulse.out_s + _FIRST_PROBE_S
        self.registry.move(worker, State.SUSPECT, why)

    async def _check(self, worker: Worker, pulse: Pulse) -> None:
        began_s = time.monotonic()
        try:
            await self.registry.check(worker)
            self.metrics.health_checked(worker, True)
            pulse.num_bad, pulse.num_good = 0, pulse.num_good + 1
            why = self._may_return(worker, pulse)
            is_broken = bool(pulse.breaks) and pulse.breaks[-1] >= worker.learned_s
            if why or is_broken or began_s - worker.learned_s > _LEARN_S:
                await self.registry.learn(worker)  # it may be another process by now
            if why and self._may_return(worker, pulse):  # it may be drained or gone by now
                pulse.num_failures = 0
                pulse.breaks.clear()
                self.registry.move(worker, State.READY, why)
            interval_s = float(self.options.health_check_interval_secs)
            if worker.state is State.UNHEALTHY:
                interval_s = min(interval_s, _FIRST_PROBE_S)
            pulse.due_s = time.monotonic() + interval_s * random.uniform(0.9, 1)
        except (TransferError, OSError, TimeoutError) as error:
            self.metrics.health_checked(worker, False)
            is_quick = time.monotonic() - began_s < _BURST_S
            self._is_unwell(worker, pulse, str(error) or type(error).__name__, is_quick)
        finally:
            pulse.is_checking = False

    def _may_return(self, worker: Worker, pulse: Pulse) -> str:
        """Why a worker that was out gets requests again after a good check, or ""."""
        if worker.state is State.SUSPECT and pulse.reopens_s == math.inf:
            return "it answers again"
        if worker.state is not State.UNHEALTHY:
            return ""
        is_enough = pulse.num_good >= self.options.health_success_threshold
        return f"{pulse.num_good} good checks" * is_enough

    def _is_unwell(self, worker: Worker, pulse: Pulse, why: str, is_quick: bool) -> None:
        """A check failed. A quick failure right after a broken connection is a dead process; a slow
        one may be a busy one, for which the threshold stands."""
        now_s = time.monotonic()
        pulse.num_good, pulse.num_bad = 0, pulse.num_bad + 1
        if worker.state is State.READY:
            wait_s = float(self.options.health_check_interval_secs)
            pulse.due_s = now_s + (wait_s if is_quick else min(wait_s, _RECHECK_S))
            if is_quick and pulse.breaks and now_s - pulse.breaks[-1] < 2 * _BURST_S:
                self._suspend(worker, pulse, why)
                return
        else:
            # back within a tenth of the time that it was out
            wait_s = max(_FIRST_PROBE_S, (now_s - pulse.out_s) / 10)
            pulse.due_s = now_s + min(wait_s, float(self.options.health_check_interval_secs))
        is_new = worker.state in (State.READY, State.SUSPECT)
        if is_new and pulse.num_bad >= self.options.health_failure_threshold:
            if worker.state is State.READY:
                pulse.out_s, pulse.due_s = now_s, now_s + _FIRST_PROBE_S
            self.registry.move(worker, State.UNHEALTHY, why)
            if self.options.remove_unhealthy_workers:
                self.registry.remove(worker, "unhealthy, and --remove-unhealthy-workers is set")
