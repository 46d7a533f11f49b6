"""ControlHandler: operators' commands, answered between two steps. Features answer most of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixlm.base.errors import RadixError, RankLost
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import Control

if TYPE_CHECKING:
    from radixlm.scheduler.loop import Scheduler

log = logging.getLogger(__name__)

Verb = Callable[[Control], ControlReply | None]


class Commands:
    """What a feature answers to operators, by verb. A verb that returns None is answered later;
    those of ``after_steps`` find no step in flight."""

    verbs: Mapping[str, Verb] = {}
    after_steps: frozenset[str] = frozenset()

    @property
    def num_pending(self) -> int:
        """Calls that ``advance`` answers."""
        return 0

    def advance(self, is_idle: bool) -> list[ControlReply]:
        """Work on for a slice, between two steps; the replies that are done."""
        return []

    def ended(self, reply: ControlReply) -> list[ControlReply]:
        """The work of another thread is done; what else it answers."""
        return []

    def note(self, now_s: float) -> None:
        """Called once a second."""

    def idle(self) -> None:
        """Nothing runs or waits: the cache was emptied, or that has lasted for a while."""


class ControlHandler:
    """Answers ``Control`` messages; verbs that nobody knows go to the executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        commands: Sequence[Callable[[ControlHandler], Commands]] = (),
    ) -> None:
        self.scheduler = scheduler
        self.num_breaches = 0
        self.pending: list[tuple[str, Future[Callable[[], Any]]]] = []  # work of other threads
        self._verbs: dict[str, Verb] = {
            "flush_cache": self._flush,
            "ping": self._ping,
        }
        self._commands = [make(self) for make in commands]
        self._after_steps = set[str]()
        for one in self._commands:
            self._verbs |= one.verbs
            self._after_steps |= one.after_steps

    @property
    def num_pending(self) -> int:
        """Commands whose work goes on in another thread, or in slices."""
        return len(self.pending) + sum(one.num_pending for one in self._commands)

    def note(self, now_s: float) -> None:
        """Called once a second."""
        for one in self._commands:
            one.note(now_s)

    def idle(self) -> None:
        """Nothing runs or waits; see ``Commands``."""
        for one in self._commands:
            one.idle()

    def answer(self, control: Control) -> ControlReply | None:
        """The reply to a command; an error becomes a reply that is not ok. None: the work goes on
        in another thread, and ``finished`` has the reply."""
        if control.verb in self._after_steps:  # what a step raises does not fail the command
            self.scheduler.commit_inflight()
        try:
            return self._verbs.get(control.verb, self.execute)(control)
        except RankLost:
            raise
        except Exception as error:
            return _failed(control.call_id, error)

    def execute(self, control: Control) -> ControlReply | None:
        """Have the executor answer."""
        data = self.scheduler.executor.control(control.verb, control.args)
        if isinstance(data, Future):
            self.pending.append((control.call_id, data))
            return None
        return ControlReply(control.call_id, True, data=data)

    def finished(self) -> list[ControlReply]:
        """Replies to commands whose work another thread has done. Its result is called here, in
        between two steps, to make what it has prepared take effect."""
        s, replies = self.scheduler, list[ControlReply]()
        for one in self._commands:
            if one.num_pending:
                replies += one.advance(not s.planner.running and not s.queue)
        for call_id, future in [one for one in self.pending if one[1].done()]:
            self.pending.remove((call_id, future))
            try:
                reply = ControlReply(call_id, True, data=future.result()())
            except RankLost:
                raise
            except Exception as error:
                reply = _failed(call_id, error)
            replies.append(reply)
            for command in self._commands:
                replies += command.ended(reply)
        return replies

    def _flush(self, control: Control) -> ControlReply:
        s = self.scheduler
        if s.planner.running or len(s.queue):
            running, waiting = len(s.planner.running), len(s.queue)
            message = f"not flushed: {running} requests run and {waiting} wait"
            return ControlReply(control.call_id, False, message)
        if not self.empty_cache():
            message = "not flushed: a slow tier still reads pages; try again"
            return ControlReply(control.call_id, False, message)
        return ControlReply(control.call_id, True, "Cache flushed.")

    def empty_cache(self) -> bool:
        """Whether it could be done: no request may hold a page."""
        s = self.scheduler
        s.hooks.flush()
        if s.kv_manager.prefix_cache.num_locked:
            return False
        s.kv_manager.prefix_cache.reset()
        if s.drafting is not None:
            s.drafting.flush()
        self.idle()
        return True

    def _ping(self, control: Control) -> ControlReply:
        return ControlReply(control.call_id, True, data="pong")


def _failed(call_id: str, error: Exception) -> ControlReply:
    """The reply to a command that failed. A fault of its code ends the command, not the engine."""
    if isinstance(error, (RadixError, TypeError, ValueError, OverflowError, OSError)):
        return ControlReply(call_id, False, str(error))
    log.error("an operator's command failed", exc_info=error)
    return ControlReply(call_id, False, f"{type(error).__name__}: {error}")
