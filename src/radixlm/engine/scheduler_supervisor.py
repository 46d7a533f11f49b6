"""An exception in a step costs the engine what it knew of its requests, not its process.

The model stays loaded; scheduler, ledgers and tables are made anew, and the engine says that it is
ready once more, so that intake sends every request again from where it stands. What was computed
alone when it struck is blamed, and fails alone the second time, as after a death of the process.
"""

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

from radixlm.engine.features.inflight_log import InflightLog
from radixlm.scheduler.loop import Scheduler
from radixlm.wire.channel import Channel
from radixlm.wire.replies import Ready

log = logging.getLogger(__name__)

# so many failures without a token between them: the process itself is ill
MAX_FAILURES = 64


class SchedulerSupervisor:
    """Serves with schedulers that ``make`` builds around the same model, one after another."""

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
        """Leave at the next tick; may be called by a signal handler."""
        self._is_stopped = self.scheduler.is_stopped = True

    def run(self) -> None:
        """Serve until told to stop; raises what goes on to strike whatever is computed."""
        while not self._is_stopped:
            try:
                self.scheduler.run()
                return
            except Exception as error:
                if not self._may_go_on():
                    raise
                log.error("a step failed; its requests start again", exc_info=error)
            self._renew()

    def _may_go_on(self) -> bool:
        """A device that has failed answers every call with an error: only a new process helps."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return False
        self._num_failures += 1
        if self.scheduler.committer.num_generated:
            self._num_failures = 1
        return self._num_failures <= MAX_FAILURES

    def _renew(self) -> None:
        old = self.scheduler
        poison_rid = old.arriving or self._flight.current
        for request in list(old.committer.requests.values()):
            old.hooks.release(request)
        self._channel.receive(0)  # all of it is sent again
        fresh = self._make()
        fresh.sleep_s, fresh.is_stopped = old.sleep_s, self._is_stopped
        self.scheduler = fresh
        del old
        gc.collect()  # what the failed step held
        self._channel.send(Ready(self._facts | {"poison_rid": poison_rid}))
