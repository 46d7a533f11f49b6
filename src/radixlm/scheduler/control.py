"""ControlHandler: operators' commands, answered between two steps: flush, pause, continue, info."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from radixlm.base.errors import RadixError, RankLost
from radixlm.base.record import replace
from radixlm.scheduler.tree_view import TreeView
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import KV_CACHE, MEMORY_TAGS, WEIGHTS, AbortRequest, Control

if TYPE_CHECKING:
    from radixlm.scheduler.loop import Scheduler

log = logging.getLogger(__name__)

MAX_SLEEP_S = 60.0
MAX_PREPARING_S = 5.0
# commands that read the weights which are served
NEED_WEIGHTS = frozenset({"load_lora_adapter"})
# commands that find no step in flight: what one raises fails the step, not the command
AFTER_STEPS = frozenset({"pause", "release_memory", "publish_weights"})


class ControlHandler:
    """Answers ``Control`` messages; verbs that it does not know go to the executor."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_breaches = 0
        self._pending: list[tuple[str, Future[Callable[[], Any]]]] = []
        self._resuming: dict[str, tuple[str, ...]] = {}  # tags by call, the weights among them
        self._joined: list[str] = []  # calls that the end of that one answers
        self._update = ""  # the call that reads new weights, until they are published or dropped
        self._verbs = {
            "flush_cache": self._flush,
            "pause": self._pause,
            "continue": self._continue,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "info": self._info,
            "kv_snapshot": self._kv_snapshot,
            "slow_down": self._slow_down,
            "freeze_gc": self._freeze_gc,
            "publish_weights": self._publish_weights,
            "ping": self._ping,
            "tree": self._tree,
            "tree_path": self._tree_path,
        }
        self.view = TreeView(scheduler.kv_manager.parts)

    @property
    def num_pending(self) -> int:
        """Commands whose work goes on in another thread, or in slices."""
        return len(self._pending) + self.view.num_asked

    def answer(self, control: Control) -> ControlReply | None:
        """The reply to a command; an error becomes a reply that is not ok. None: the work goes on
        in another thread, and ``finished`` has the reply."""
        verb = self._verbs.get(control.verb)
        if control.verb in AFTER_STEPS:
            self._scheduler.commit_inflight()
        try:
            if verb is not None:
                return verb(control)
            if why := self._why_not_now(control.verb):
                return ControlReply(control.call_id, False, f"{control.verb}: {why}")
            return self._execute(control)
        except RankLost:
            raise
        except Exception as error:
            return _failed(control.call_id, error)

    def _why_not_now(self, verb: str) -> str:
        if verb in NEED_WEIGHTS and WEIGHTS in self._scheduler.released:
            return "the weights are released; /resume_memory_occupation takes them back"
        if verb == "prepare_weights" and self._resuming:
            return "released weights are being read; update again when they are there"
        return ""

    def _execute(self, control: Control) -> ControlReply | None:
        data = self._scheduler.executor.control(control.verb, control.args)
        if control.verb in ("prepare_weights", "drop_weights"):
            self._update = control.call_id if control.verb == "prepare_weights" else ""
        if isinstance(data, Future):
            self._pending.append((control.call_id, data))
            return None
        return ControlReply(control.call_id, True, data=data)

    def finished(self) -> list[ControlReply]:
        """Replies to commands whose work another thread has done. Its result is called here, in
        between two steps, to make what it has prepared take effect."""
        replies = self._walked() if self.view.num_asked else []
        for call_id, future in [one for one in self._pending if one[1].done()]:
            self._pending.remove((call_id, future))
            try:
                reply = ControlReply(call_id, True, data=future.result()())
            except RankLost:
                raise
            except Exception as error:
                reply = _failed(call_id, error)
            replies += [reply, *self._ended(reply)]
        return replies

    def _walked(self) -> list[ControlReply]:
        """Go on with the walk over the prefix cache; its replies when it has ended."""
        s = self._scheduler
        asked, tree = self.view.advance(not s.planner.running and not s.queue)
        return [ControlReply(call_id, True, data=tree) for call_id in asked]

    def _ended(self, reply: ControlReply) -> list[ControlReply]:
        """The work of another thread is done; what else it answers."""
        if reply.call_id == self._update and not reply.ok:
            self._update = ""
        if reply.call_id not in self._resuming:
            return []
        tags, joined, self._joined = self._resuming.pop(reply.call_id), self._joined, []
        if reply.ok:
            self._resumed(tags)
        return [ControlReply(one, reply.ok, reply.message, reply.data) for one in joined]

    def _flush(self, control: Control) -> ControlReply:
        s = self._scheduler
        if s.planner.running or len(s.queue):
            running, waiting = len(s.planner.running), len(s.queue)
            message = f"not flushed: {running} requests run and {waiting} wait"
            return ControlReply(control.call_id, False, message)
        if not self._empty_cache():
            message = "not flushed: a slow tier still reads pages; try again"
            return ControlReply(control.call_id, False, message)
        return ControlReply(control.call_id, True, "Cache flushed.")

    def _empty_cache(self) -> bool:
        """Whether it could be done: no request may hold a page."""
        s = self._scheduler
        s.hooks.flush()
        if s.kv_manager.prefix_cache.num_locked:
            return False
        s.kv_manager.prefix_cache.reset()
        if s.drafting is not None:
            s.drafting.flush()
        self.check_invariants()
        return True

    def _release_memory(self, control: Control) -> ControlReply | None:
        """Give back the memory of ``tags``; no step is planned until all of it is resumed. What
        other threads prepare for the weights is awaited."""
        s = self._scheduler
        tags = [str(tag) for tag in control.args["tags"]]
        if WEIGHTS in tags and (self._resuming or self._update):
            message = "not released: weights are being read; try again"
            return ControlReply(control.call_id, False, message)
        if new := [tag for tag in tags if tag not in s.released]:
            if refusal := self._why_not_released(new):
                return ControlReply(control.call_id, False, f"not released: {refusal}")
            self.set_released({*s.released, *new})
            try:
                data = s.executor.control(control.verb, {"tags": new})
            except Exception:
                self.set_released(set(s.released) - set(new))
                raise
            return ControlReply(control.call_id, True, data=data)
        return ControlReply(control.call_id, True)

    def _why_not_released(self, tags: Sequence[str]) -> str:
        s = self._scheduler
        at_work = [future for _, future in self._pending] if WEIGHTS in tags else []
        if wait(at_work, MAX_PREPARING_S).not_done:
            return "adapters are being read; try again"
        running, waiting = len(s.planner.running), len(s.queue)
        if not s.is_held and (running or waiting):
            return (
                f"{running} requests run and {waiting} wait; end them with /abort_request or "
                "/pause_generation first"
            )
        if KV_CACHE not in tags:
            return ""
        if running:
            return f"{running} paused requests keep their KV; pause with mode 'retract' or 'abort'"
        moving = sum(part.reservations.num_pages for part in s.kv_manager.parts)
        is_empty = self._empty_cache() and not moving
        return "" if is_empty else "a slow tier still moves pages; try again"

    def _resume_memory(self, control: Control) -> ControlReply | None:
        """Take back the memory of ``tags``, as far as it was released. Weights that another call
        reads already answer both."""
        call_id = control.call_id
        tags = set(control.args["tags"]) & set(self._scheduler.released)
        if WEIGHTS in tags and self._update:
            message = "not resumed: new weights are being read; try again"
            return ControlReply(call_id, False, message)
        if joins := WEIGHTS in tags and bool(self._resuming):
            tags -= {WEIGHTS}
        reply: ControlReply | None = ControlReply(call_id, True)
        if tags:
            reply = self._execute(Control(call_id, control.verb, {"tags": _ordered(tags)}))
        if reply is None:
            self._resuming[call_id] = _ordered(tags)
        else:
            self._resumed(tags)
        if joins:
            self._joined.append(call_id)
        return None if joins else reply

    def _resumed(self, tags: Iterable[str]) -> None:
        self.set_released(set(self._scheduler.released) - set(tags))

    def set_released(self, tags: Iterable[str]) -> None:
        """Plan no step while memory of ``tags`` is away; none: all of it is there."""
        s = self._scheduler
        s.released = _ordered(tags)
        for part in s.kv_manager.parts:
            part.reservations.is_closed = KV_CACHE in s.released

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

    def _publish_weights(self, control: Control) -> ControlReply:
        """Let prepared weights take effect. Requests that run are computed again under them, or
        with ``keeps_kv`` go on with the keys and values that they have."""
        s, args = self._scheduler, control.args
        self._update = ""
        running = list(s.planner.running)
        for request in reversed(running):
            if args.get("keeps_kv"):  # such pages are of both: nobody else may use them
                request.share_limit = min(request.share_limit, request.num_committed)
            else:
                s.planner.retract(request)
        data = s.executor.control(control.verb, args)
        s.limits = replace(s.limits, weights_version=data["namespace"])
        for request in s.queue:
            request.namespace = replace(request.namespace, weights_version=data["namespace"])
        num_paused = len(s.planner.running) + len(s.queue)
        if args.get("flush") and not s.planner.running:
            s.hooks.flush()
            if not s.kv_manager.prefix_cache.num_locked:
                s.kv_manager.prefix_cache.reset()
        if s.drafting is not None:
            s.drafting.flush()
        return ControlReply(control.call_id, True, data={**data, "num_paused": num_paused})

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

    def _ping(self, control: Control) -> ControlReply:
        return ControlReply(control.call_id, True, data="pong")

    def _tree(self, control: Control) -> None:
        """The most used nodes of the prefix cache; ``finished`` has the reply."""
        self.view.ask(control.call_id, bool(control.args.get("with_ids")))

    def _tree_path(self, control: Control) -> ControlReply:
        """The nodes along a prompt."""
        ids = np.asarray(control.args["ids"], np.int32)
        return ControlReply(control.call_id, True, data=self.view.find(ids))

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

    def check_invariants(self) -> None:
        """While idle: log, count and repair invariant violations of pages and slots."""
        kv_manager = self._scheduler.kv_manager
        running = self._scheduler.planner.running
        violations = kv_manager.find_violations(running)
        if not violations:
            return
        self.num_breaches += len(violations)
        for violation in violations:
            log.error("KV cache manager: %s", violation)
        kv_manager.repair(running)


def _ordered(tags: Iterable[str]) -> tuple[str, ...]:
    return tuple(tag for tag in MEMORY_TAGS if tag in tags)


def _failed(call_id: str, error: Exception) -> ControlReply:
    """The reply to a command that failed. A fault of its code ends the command, not the engine."""
    if isinstance(error, (RadixError, TypeError, ValueError, OverflowError, OSError)):
        return ControlReply(call_id, False, str(error))
    log.error("an operator's command failed", exc_info=error)
    return ControlReply(call_id, False, f"{type(error).__name__}: {error}")
