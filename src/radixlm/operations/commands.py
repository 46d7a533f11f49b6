"""OperatorCommands: pause, continue, info and others that concern the whole scheduler."""

from __future__ import annotations

import gc
from typing import Any

from radixlm.scheduler.control import Commands, ControlHandler
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import AbortRequest, Control

MAX_SLEEP_S = 60.0


class OperatorCommands(Commands):
    """Of one scheduler."""

    after_steps = frozenset({"pause"})

    def __init__(self, handler: ControlHandler) -> None:
        self._scheduler = handler.scheduler
        self.verbs = {
            "pause": self._pause,
            "continue": self._continue,
            "info": self._info,
            "kv_snapshot": self._kv_snapshot,
            "slow_down": self._slow_down,
            "freeze_gc": self._freeze_gc,
        }

    def _kv_snapshot(self, control: Control) -> ControlReply:
        """Publish the whole prefix cache as KV events."""
        self._scheduler.hooks.publish()
        return ControlReply(control.call_id, True)

    def _pause(self, control: Control) -> ControlReply:
        """Plan no more steps. Modes: in_place keeps the KV, retract frees it, abort ends all
        requests."""
        s = self._scheduler
        mode = str(control.args.get("mode") or "abort")
        s.is_paused = True
        if mode == "abort":
            s.abort(AbortRequest(all=True, message="generation was paused"))
        elif mode == "retract":
            for request in reversed(list(s.planner.running)):
                s.planner.retract(request)
        return ControlReply(control.call_id, True, "Generation paused.")

    def _continue(self, control: Control) -> ControlReply:
        self._scheduler.is_paused = False
        return ControlReply(control.call_id, True, "Generation continued.")

    def _slow_down(self, control: Control) -> ControlReply:
        sleep_s = float(control.args.get("forward_sleep_time") or 0.0)
        if not 0 <= sleep_s <= MAX_SLEEP_S:  # also false for NaN
            raise ValueError(f"forward_sleep_time: {sleep_s} is not within 0 to {MAX_SLEEP_S} s")
        self._scheduler.sleep_s = sleep_s
        return ControlReply(control.call_id, True)

    def _freeze_gc(self, control: Control) -> ControlReply:
        gc.collect()
        gc.freeze()
        return ControlReply(control.call_id, True)

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
            "avg_spec_accept_length": load.spec_accept_length,
            "memory_usage": s.executor.control("memory_usage", {}),
        }
        return ControlReply(control.call_id, True, data=data)
