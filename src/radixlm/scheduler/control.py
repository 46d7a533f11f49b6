"""Operators' wishes, answered between two steps: flush, pause, continue, info, slow_down."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from radixlm.base.errors import RadixError
from radixlm.memory.check import repair
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import AbortRequest, Control

if TYPE_CHECKING:
    from radixlm.scheduler.loop import Scheduler

log = logging.getLogger(__name__)


class ControlHandler:
    """The verbs of ``Control``. What concerns tensors is passed on to the executor."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_breaches = 0
        self._verbs = {
            "flush_cache": self._flush,
            "pause": self._pause,
            "continue": self._continue,
            "info": self._info,
            "slow_down": self._slow_down,
            "freeze_gc": self._freeze_gc,
            "ping": self._ping,
        }

    def answer(self, control: Control) -> ControlReply:
        """Always a reply; a failure is told, never raised."""
        verb = self._verbs.get(control.verb)
        try:
            if verb is not None:
                return verb(control)
            data = self._scheduler.executor.control(control.verb, control.args)
            return ControlReply(control.call_id, True, data=data)
        except (RadixError, TypeError, ValueError, OverflowError) as error:
            return ControlReply(control.call_id, False, str(error))

    def _flush(self, control: Control) -> ControlReply:
        s = self._scheduler
        if s.planner.running or len(s.queue):
            running, waiting = len(s.planner.running), len(s.queue)
            message = f"not flushed: {running} requests run and {waiting} wait"
            return ControlReply(control.call_id, False, message)
        s.kv_manager.cache.reset()
        self.check_invariants()
        return ControlReply(control.call_id, True, "Cache flushed.")

    def _pause(self, control: Control) -> ControlReply:
        """Modes: in_place keeps the KV, retract gives it back, abort ends all requests."""
        s = self._scheduler
        mode = str(control.args.get("mode") or "abort")
        s.is_paused = True
        if mode == "abort":
            s._abort(AbortRequest(all=True, message="generation was paused"))
        elif mode == "retract":
            while s.inflight:
                s._commit(*s.inflight.popleft())
            for request in reversed(list(s.planner.running)):
                s.planner.retract(request)
        return ControlReply(control.call_id, True, "Generation paused.")

    def _continue(self, control: Control) -> ControlReply:
        self._scheduler.is_paused = False
        return ControlReply(control.call_id, True, "Generation continued.")

    def _slow_down(self, control: Control) -> ControlReply:
        self._scheduler.sleep_s = float(control.args.get("forward_sleep_time") or 0.0)
        return ControlReply(control.call_id, True)

    def _freeze_gc(self, control: Control) -> ControlReply:
        gc.collect()
        gc.freeze()
        return ControlReply(control.call_id, True)

    def _ping(self, control: Control) -> ControlReply:
        return ControlReply(control.call_id, True, data="pong")

    def _info(self, control: Control) -> ControlReply:
        s = self._scheduler
        load = s.load(s.clock())
        data: dict[str, Any] = {
            "last_gen_throughput": load.gen_throughput,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_used_tokens": load.num_used_tokens,
            "max_total_num_tokens": load.num_total_tokens,
            "num_retracted_reqs": load.num_retracted,
            "cache_hit_rate": load.cache_hit_rate,
            "num_steps": load.steps,
            "num_breaches": load.num_breaches,
            "memory_usage": s.executor.control("memory_usage", {}),
        }
        return ControlReply(control.call_id, True, data=data)

    def check_invariants(self) -> None:
        """At idle: a violation is logged with its numbers, counted and repaired; we live on."""
        kv_manager = self._scheduler.kv_manager
        running = self._scheduler.planner.running
        violations = kv_manager.find_violations(running)
        if not violations:
            return
        self.num_breaches += len(violations)
        for violation in violations:
            log.error("ledger: %s", violation)
        window = kv_manager.window.pages if kv_manager.window is not None else None
        repair(
            kv_manager.pages,
            kv_manager.slots,
            kv_manager.cache,
            kv_manager.holdings(running),
            window,
        )
