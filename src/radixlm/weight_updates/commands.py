"""WeightCommands: what the scheduler does where weights change, or memory is given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import wait

from radixlm.base.record import replace
from radixlm.scheduler.control import Commands, ControlHandler
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import KV_CACHE, MEMORY_TAGS, WEIGHTS, Control

MAX_PREPARING_S = 5.0


class WeightCommands(Commands):
    """New weights are prepared in other threads and published between two steps."""

    after_steps = frozenset({"release_memory", "publish_weights"})

    def __init__(self, handler: ControlHandler) -> None:
        self._handler, self._scheduler = handler, handler.scheduler
        self._resuming: dict[str, tuple[str, ...]] = {}  # tags by call, the weights among them
        self._joined: list[str] = []  # calls that the end of that one answers
        self._update = ""  # the call that reads new weights, until they are published or dropped
        self.verbs = {
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "prepare_weights": self._prepare_weights,
            "publish_weights": self._publish_weights,
            "drop_weights": self._drop_weights,
            "load_lora_adapter": self._load_adapter,
        }

    def _load_adapter(self, control: Control) -> ControlReply | None:
        """It reads the weights which are served."""
        if WEIGHTS in self._scheduler.released:
            why = "the weights are released; /resume_memory_occupation takes them back"
            return ControlReply(control.call_id, False, f"{control.verb}: {why}")
        return self._handler.execute(control)

    def _prepare_weights(self, control: Control) -> ControlReply | None:
        if self._resuming:
            why = "released weights are being read; update again when they are there"
            return ControlReply(control.call_id, False, f"{control.verb}: {why}")
        reply = self._handler.execute(control)
        self._update = control.call_id
        return reply

    def _drop_weights(self, control: Control) -> ControlReply | None:
        reply = self._handler.execute(control)
        self._update = ""
        return reply

    def ended(self, reply: ControlReply) -> list[ControlReply]:
        """The work of another thread is done; what else it answers."""
        if reply.call_id == self._update and not reply.ok:
            self._update = ""
        if reply.call_id not in self._resuming:
            return []
        tags, joined, self._joined = self._resuming.pop(reply.call_id), self._joined, []
        if reply.ok:
            self._resumed(tags)
        return [ControlReply(one, reply.ok, reply.message, reply.data) for one in joined]

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
            s.set_released({*s.released, *new})
            try:
                data = s.executor.control(control.verb, {"tags": new})
            except Exception:
                s.set_released(set(s.released) - set(new))
                raise
            return ControlReply(control.call_id, True, data=data)
        return ControlReply(control.call_id, True)

    def _why_not_released(self, tags: Sequence[str]) -> str:
        s = self._scheduler
        at_work = [future for _, future in self._handler.pending] if WEIGHTS in tags else []
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
        is_empty = self._handler.empty_cache() and not moving
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
            reply = self._handler.execute(Control(call_id, control.verb, {"tags": _ordered(tags)}))
        if reply is None:
            self._resuming[call_id] = _ordered(tags)
        else:
            self._resumed(tags)
        if joins:
            self._joined.append(call_id)
        return None if joins else reply

    def _resumed(self, tags: Iterable[str]) -> None:
        self._scheduler.set_released(set(self._scheduler.released) - set(tags))

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


def _ordered(tags: Iterable[str]) -> tuple[str, ...]:
    return tuple(tag for tag in MEMORY_TAGS if tag in tags)
