"""What a rank that does not schedule does: it reads plans and commands, obeys them in order, and
ends at the first message that it cannot obey."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import torch

from radixlm.base.errors import InvalidRequest, InvariantError, RadixError
from radixlm.executor.runner import Runner
from radixlm.parallel.plan_codec import PlanDecoder
from radixlm.parallel.relay import COMMAND, FINISH, PAGES, PLAN, READ, RENEW, STOP, Answer, Command
from radixlm.tiers import base as tiers

log = logging.getLogger(__name__)


class Leader(Protocol):
    """Rank 0 as the others see it."""

    def read(self) -> bytes | memoryview:
        """Wait for its next message: a kind, then data. RankLost when there will be no more."""

    def answer(self, answer: Answer) -> None:
        """May be called by any thread."""


class RankLoop:
    """Obeys ``leader``; ``make`` makes a runner with empty tables around the loaded model."""

    def __init__(self, rank: int, leader: Leader, make: Callable[[], Runner]) -> None:
        self.rank, self._leader, self._make = rank, leader, make
        self._futures: dict[int, Future[Callable[[], Any]]] = {}
        self._renew()

    def _renew(self) -> None:
        self.runner, self._decoder = self._make(), PlanDecoder()
        self._last_index: int | None = None

    def run(self) -> None:
        """Serve until rank 0 says stop. An exception leaves the rank unfit to go on."""
        while True:
            message = memoryview(self._leader.read())
            kind, data = message[0], message[1:]
            if kind == PLAN:
                self._step(data)
            elif kind == READ:
                self.runner.follow_read()
            elif kind == COMMAND:
                self._obey(msgspec.msgpack.decode(data, type=Command))
            elif kind == FINISH:
                self._finish(*msgspec.msgpack.decode(data, type=tuple[int, int]))
            elif kind == PAGES:
                self._move(*msgspec.msgpack.decode(data, type=tuple[int, int, tiers.Command]))
            elif kind == RENEW:
                self._renew()
            elif kind == STOP:
                with suppress(InvalidRequest):  # without tiers there is no such command
                    self.runner.control("close_tiers", {})
                return
            else:
                raise InvariantError(f"rank {self.rank}: a message of unknown kind {kind}")

    def _step(self, data: memoryview) -> None:
        """Compute this rank's part of a step."""
        given = self._decoder.decode(data)
        index, last = given.plan.index, self._last_index
        if last is not None and index != last + 1:
            raise InvariantError(f"rank {self.rank}: plan {index} follows plan {last}")
        self._last_index = index
        if self.runner.followers is None:
            tables = self.runner.tables  # the last tokens of slots, which rank 0 has sampled
            slots_S, tokens_S = map(torch.from_numpy, (given.known_slots, given.known_tokens))
            tables.next_token[slots_S.to(tables.device)] = tokens_S.to(tables.device)
        self.runner.follow(given.plan)

    def _obey(self, command: Command) -> None:
        """Run a command. What goes on in a thread is answered when it has prepared its work."""
        call = command.call
        try:
            data = self.runner.control(command.verb, command.args)
        except (RadixError, TypeError, ValueError, OverflowError) as error:
            self._fail(call, error)
            return
        if isinstance(data, Future):
            self._futures[call] = data
            data.add_done_callback(lambda _: self._leader.answer(Answer(self.rank, call)))
        else:
            self._leader.answer(Answer(self.rank, call, data))

    def _move(self, call: int, group: int, command: tiers.Command) -> None:
        """Have this rank's worker move its part of pages, if it is of the attention group; rank 0
        awaits the last report."""

        def answer(report: tiers.Report | None) -> None:
            if not isinstance(report, tiers.Arrived):
                data = b"" if report is None else msgspec.msgpack.encode(report)
                self._leader.answer(Answer(self.rank, call, data))

        self.runner.control("pages", {"group": group, "command": command, "answer": answer})

    def _finish(self, prepared: int, call: int) -> None:
        """Let what call ``prepared`` has prepared take effect."""
        try:
            self._futures.pop(prepared).result()()
        except (RadixError, TypeError, ValueError, OverflowError, OSError) as error:
            self._fail(call, error)
        else:
            self._leader.answer(Answer(self.rank, call))

    def _fail(self, call: int, error: Exception) -> None:
        self._leader.answer(Answer(self.rank, call, None, str(error), type(error).__name__))
