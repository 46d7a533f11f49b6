"""LiveRequests: the unfinished requests of one intake, which outlive the engines.

When an engine dies, its requests go to another one from where they were (docs/design/recovery.md).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from radixlm.base.errors import EngineError, InvariantError, Overloaded
from radixlm.base.record import replace
from radixlm.intake.engine_links import EngineLinks
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.interfaces import Adapters, Occupation, Weights
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.wire.link import Link
from radixlm.wire.replies import Failed, Finish, LoadReport
from radixlm.wire.requests import Control, TokenizedRequest

log = logging.getLogger(__name__)

# engine deaths while a request was computed alone after which that request is failed
MAX_CRASHES = 2


class LiveRequests(EngineLinks):
    """``requests`` holds them by id. ``leaving`` is set when the server shuts down, or when there
    will be no engine any more."""

    adapters: Adapters
    weights: Weights
    occupation: Occupation

    def __init__(
        self, links: Sequence[Link], method: str, facts: IntakeFacts, observers: Sequence[Observer]
    ) -> None:
        super().__init__(links, method)
        self.facts, self.observers = facts, tuple(observers)
        self._model_context = facts.context_len  # the engine may have room for less
        self.requests: dict[str, RequestState] = {}
        self.leaving = asyncio.Event()
        self.ready = asyncio.Event()
        self.failure: Failed | None = None
        self.on_failed: Callable[[Failed], None] | None = None
        self._drained = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Requests that no engine has: it died, and the next one starts."""
        return sum(not self.replicas.is_computed(rid) for rid in self.requests)

    def _dispatch(self, state: RequestState, wire: TokenizedRequest) -> None:
        num_tokens = state.prompt_tokens + len(state.output_ids)
        replica = self.replicas.assign(state.rid, state.replica, num_tokens)
        if replica is not None:
            replica.link.send(wire)

    def _is_with_engine(self, rid: str) -> bool:
        return self.ready.is_set() and self.replicas.is_computed(rid)

    def _end_aborted(self, among: set[str]) -> None:
        for state in list(self.requests.values()):
            if state.rid in among and state.abort_message is not None:
                self._fail(state, Finish("abort", message=state.abort_message))

    def _fail(self, state: RequestState, finish: Finish) -> None:
        """End a request without the scheduler."""
        state.fail(finish)
        self._forget(state.rid)

    def _forget(self, rid: str) -> None:
        state = self.requests.pop(rid, None)
        self.replicas.forget(rid)
        if state is not None and state.pending is not None and state.pending.finish is not None:
            for observer in self.observers:
                observer.ended(state, state.pending.finish)
        if not self.requests:
            self._drained.set()

    def become_ready(self, facts: dict[str, Any], index: int = 0) -> None:
        """An engine serves: send it every request that no other engine has, from where it was."""
        replica = self.replicas[index]
        if not self.weights.is_current(facts):
            self.weights.bring(replica, facts)
            return
        total, context_len = facts.get("max_total_num_tokens", 0), facts.get("context_len")
        context_len = self._model_context if context_len is None else context_len
        if int(total) < 0 or int(context_len) < 1:
            raise InvariantError(f"an engine with {total} tokens and a context of {context_len}")
        self.facts = replace(
            self.facts,
            max_total_tokens=int(total),
            context_len=min(self._model_context, int(context_len)),
            model_context_len=self._model_context,
            slice_size=2 * int(facts.get("max_running", 0)) or self.facts.slice_size,
        )
        replica.facts, replica.beat_s = facts, time.monotonic()
        replica.is_ready, replica.is_gone = True, False
        self.weights.served_by(replica)
        self.adapters.restore(replica)
        self.occupation.restore(replica)
        if self.is_paused:
            replica.link.send(Control("pause again", "pause", {"mode": "in_place"}))
        self.replicas.orphans(replica)
        self._send_again()

    def _send_again(self) -> None:
        """Send the requests that no engine has. Those with crashes go last, so that another death
        by chance counts against another request."""
        for state in sorted(self.requests.values(), key=lambda state: state.crash_count):
            if not self.replicas.is_computed(state.rid):
                self._dispatch(state, state.resume_request())

    def lose_engine(
        self, poison_rid: str | None = None, index: int = 0, why: str = "the engine died"
    ) -> None:
        """An engine died, as ``why`` says: its requests go to the other engines at once, or wait
        for the next one. All of them are quarantined, so that their prompts are computed one by
        one; ``poison_rid`` was computed alone when the engine died."""
        replica = self.replicas[index]
        was_serving = replica.is_ready
        replica.is_ready, replica.beat_s, replica.load = False, 0.0, LoadReport()
        lost = self.replicas.orphans(replica)
        if not self.replicas.ready:
            self.ready.clear()
        self.fail_calls(Overloaded("the engine restarts", retry_after_s=2.0), replica)
        self._end_aborted(lost)
        for state in [state for state in self.requests.values() if state.rid in lost]:
            state.is_quarantined = True
            state.crash_count += state.rid == poison_rid
            if state.crash_count >= MAX_CRASHES:
                message = (
                    f"the engine died {state.crash_count} times while it computed this request"
                )
                self._fail(state, Finish("error", message=message, status=EngineError.status))
        held = [one for rid in lost if (one := self.requests.get(rid)) is not None]
        for observer in self.observers:
            observer.held(held, why)
        self._send_again()
        for observer in self.observers if was_serving else ():
            observer.engine_lost("the engine died")

    def give_up(self, failure: Failed, index: int = 0) -> None:
        """There will be no engine for this replica any more. Without other replicas, or before it
        has served, this ends intake; the first failure is the one that is reported."""
        replica = self.replicas[index]
        others = [r for r in self.replicas if r is not replica and not r.is_gone]
        replica.is_gone, had_served = True, bool(replica.facts)
        if self.failure is not None:
            return
        if others and had_served:
            log.error("replica %d is gone for good: %s", index, failure.message)
            return
        self.failure = failure
        self.leaving.set()
        self.ready.clear()
        self.fail_calls(Overloaded(failure.message, retry_after_s=10.0))
        for state in list(self.requests.values()):
            gone = Finish("error", message=failure.message, status=503, retry_after_s=10.0)
            self._fail(state, gone)
        for observer in self.observers:
            observer.engine_lost(failure.message)
        if self.on_failed is not None:
            self.on_failed(failure)
