"""SchedulerSupervisor: after an exception in a step, it replaces the scheduler, not the process.

The model stays loaded; scheduler, KV cache manager and tables are made anew. The engine then says
once more that it is ready, so that intake sends every request again from where it was. The request
that was computed alone at the exception counts as after a death of the process.
"""

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

from radixlm.base.errors import RankLost
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.scheduler.loop import Scheduler
from radixlm.wire.channel import Channel
from radixlm.wire.replies import Ready

log = logging.getLogger(__name__)

# failures without a token between them after which the process itself must be replaced
MAX_FAILURES = 64


class SchedulerSupervisor:
    """Runs schedulers that ``make`` builds around the same model, one after another."""

    def __init__(
        self,
        scheduler: Scheduler,
        make: Callable[[], Scheduler],
        channel: Channel,
        facts: dict[str, Any],
        flight: InflightLog,
    ) -> None:
        self.scheduler, self._make, self._channel = scheduler, make, channel
        self._facts, self._flight = facts, flight
        self._num_failures = 0
        self._is_stopped = False

    def stop(self) -> None:
        """End at the next tick; a signal handler may call it."""
        self._is_stopped = self.scheduler.is_stopped = True

    def run(self) -> None:
        """Serve until stopped; raises an exception that comes again and again, or that other ranks
        cannot outlive."""
        while not self._is_stopped:
            try:
                self.scheduler.run()
                return
            except RankLost:
                raise
            except Exception as error:
                if not self._may_continue():
                    raise
                log.error("a step failed; its requests start again", exc_info=error)
            self._replace_scheduler()

    def _may_continue(self) -> bool:
        """Whether a new scheduler may help. A GPU that has failed returns errors for every call:
        then only a new process helps."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return False
        self._num_failures += 1
        if self.scheduler.committer.num_generated:
            self._num_failures = 1
        return self._num_failures <= MAX_FAILURES

    def _replace_scheduler(self) -> None:
        old = self.scheduler
        poison_rid = old.arriving or self._flight.current
        for request in list(old.committer.requests.values()):
            old.hooks.release(request)
        self._channel.receive(0)  # intake sends all of it again
        new = self._make()
        new.sleep_s, new.is_stopped = old.sleep_s, self._is_stopped
        new.is_paused = old.is_paused  # requests may come before intake says so again
        new.set_released(old.released)
        self.scheduler = new
        del old
        gc.collect()  # frees what the failed step holds
        self._channel.send(Ready(self._facts | {"poison_rid": poison_rid}))
