"""LoadLog: log lines about the load, and about prompts that take long."""

import logging
from collections.abc import Sequence

from radixlm.scheduler.interfaces import StepLog
from radixlm.scheduler.loop import Scheduler
from radixlm.scheduler.request import Request
from radixlm.wire.replies import LoadReport

log = logging.getLogger(__name__)

PREFILL_S = 2.0


class LoadLog(StepLog):
    """Of one scheduler. Times in seconds of its clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._limits, now_s = scheduler, scheduler.limits, scheduler.clock()
        self._step = self._num_generated = 0  # at the last line about the load
        self._since_s = now_s  # the time of that line, later by the rests since then
        self._prefill_s = now_s
        self._rest_s: float | None = now_s

    def stepped(self, now_s: float) -> None:
        """Write the lines that are due after a step."""
        scheduler = self._scheduler
        if self._is_due(scheduler.num_steps, now_s):
            self._write_load(scheduler.load(now_s), scheduler.committer.num_generated, now_s)
        self.write_prefills(scheduler.planner.running, now_s)

    def rest(self, now_s: float) -> None:
        """There is nothing to compute until ``resume``: it does not count in the rate."""
        if self._rest_s is None:
            self._rest_s = now_s

    def resume(self, now_s: float) -> None:
        """A step begins."""
        if self._rest_s is not None:
            self._since_s += now_s - self._rest_s
            self._rest_s = None

    def _is_due(self, num_steps: int, now_s: float) -> bool:
        """Whether a line about the load is due after ``num_steps`` steps."""
        limits = self._limits
        has_steps = 0 < limits.log_interval <= num_steps - self._step
        return has_steps and now_s - self._since_s >= limits.log_every_s

    def _write_load(self, load: LoadReport, num_generated: int, now_s: float) -> None:
        """Write it, with the rate since the last one. ``num_generated``: tokens so far."""
        rate = (num_generated - self._num_generated) / max(now_s - self._since_s, 1e-9)
        self._step, self._num_generated, self._since_s = load.steps, num_generated, now_s
        share = 100 * load.num_used_tokens / max(1, load.num_total_tokens)
        accepts = f", accept len: {load.spec_accept_length:.2f}" if load.spec_accept_length else ""
        log.info(
            "step %d: %d running, %d waiting, %d tokens held (%.0f %%), %.0f tokens/s, "
            "%.0f %% of prompts cached%s",
            load.steps,
            load.num_running,
            load.num_waiting,
            load.num_used_tokens,
            share,
            rate,
            100 * load.cache_hit_rate,
            accepts,
        )

    def write_prefills(self, running: Sequence[Request], now_s: float) -> None:
        """Every two seconds, write how far the oldest prompt is that takes longer than that."""
        if now_s - self._prefill_s < PREFILL_S:
            return
        self._prefill_s = now_s
        # a grammar's forced tokens are computed like prompts, behind them
        begun = (r for r in running if now_s - r.started_s >= PREFILL_S)
        late = [r for r in begun if r.num_committed < r.prompt_len]
        if not late:
            return
        request = late[0]
        done, total = request.num_committed, request.prefill_len
        rate = (done - request.num_cached) / (now_s - request.started_s)
        left = f", about {(total - done) / rate:.0f} s left" if rate > 0 else ""
        more = f"; {len(late) - 1} more prompts" if len(late) > 1 else ""
        log.info(
            "prefill %s: %d of %d tokens (%.0f %%, %d cached), %.0f tokens/s%s%s",
            request.rid,
            done,
            total,
            100 * done / total,
            request.num_cached,
            rate,
            left,
            more,
        )
