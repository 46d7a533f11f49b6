"""Relay: the executor of rank 0 where a replica has several ranks. It hands each plan to the other
ranks, then runs rank 0's part. What the others must hear besides plans stands in ``Order``; each
message begins with its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import RadixError, RankLost
from radixlm.executor.results import StepHandle
from radixlm.executor.runner import Runner
from radixlm.parallel.plan_codec import PlanEncoder
from radixlm.step.masks import Masks
from radixlm.step.plan import StepPlan
from radixlm.step.result import StepResult
from radixlm.tiers import base as tiers

PLAN, READ, COMMAND, FINISH, RENEW, STOP, PAGES = b"phcfrsg"

# commands that concern every rank; the others are rank 0's own
ON_ALL_RANKS = frozenset(
    {
        "memory_usage",
        "start_profile",
        "stop_profile",
        "start_expert_record",
        "stop_expert_record",
        "move_experts",
        "load_lora_adapter",
        "unload_lora_adapter",
        "keep_lora_adapters",
        "tiers",
        "release_memory",
        "resume_memory",
        "prepare_weights",
        "publish_weights",
        "drop_weights",
    }
)
_UNDO = {"load_lora_adapter": "unload_lora_adapter", "prepare_weights": "drop_weights"}


class Command(msgspec.Struct, frozen=True):
    """A command for every rank; ``call`` numbers its answers."""

    call: int
    verb: str
    args: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """What a rank says to rank 0: the answer to a command, its ``error``, or (call -1) why it
    cannot go on."""

    rank: int
    call: int
    data: Any = None
    error: str = ""
    kind: str = ""  # of the error: the name of its class


class Followers(Protocol):
    """The ranks that follow rank 0. ``limit_s``: how long an answer of theirs may take."""

    limit_s: float

    def tell(self, kind: int, data: bytes = b"") -> None:
        """Send a message to each; they read messages in order."""

    def expect(self) -> tuple[int, Future[list[Any]]]:
        """The number of a new call, and what all of them will answer to it, in the order of ranks;
        a RadixError if one fails."""


class Relay:
    """Runs the steps of a replica of several ranks; the scheduler sees one executor."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self.runner, self._followers = runner, followers
        self._encoder = PlanEncoder()
        tables = runner.tables
        # the last token of each slot; waits for the device
        self._sampled: Callable[[], NDArray[np.int64]] = lambda: tables.next_token.cpu().numpy()
        if tables.is_shared or runner.followers is not None:  # who tells the other ranks
            tokens = self._sampled()
            self._sampled = lambda: tokens

    def forward(self, plan: StepPlan) -> StepHandle:
        """Hand the plan on and compute this rank's part. Experts move before it."""
        if (moves := self.runner.due_moves()) is not None:
            with _together():
                self.control("move_experts", moves)
        self._followers.tell(PLAN, self._encoder.encode(plan, self._sampled()))
        with _together():
            return self.runner.forward(plan)

    def sample(self, step: StepHandle, masks: Masks) -> None:
        self.runner.sample(step, masks)

    def read(self, step: StepHandle) -> StepResult:
        # the log-probabilities of prompts run the head, of which each rank may hold a part
        if self.runner.followers is not None and self.runner.outputs.num_head_runs(step.items):
            self._followers.tell(READ)
        with _together():
            return self.runner.read(step)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """Run an operator's command, on every rank where it concerns them all."""
        if verb not in ON_ALL_RANKS:
            return self.runner.control(verb, args)
        call, theirs = self._followers.expect()
        self._followers.tell(COMMAND, msgspec.msgpack.encode(Command(call, verb, args)))
        mine = self.runner.control(verb, args)
        if not isinstance(mine, Future):
            # ranks of which some have exchanged their weights may not go on
            with _together() if verb == "publish_weights" else nullcontext():
                return _merged(mine, within(theirs, self._followers.limit_s, verb))
        return _when_both(mine, theirs, partial(self._finish, verb, args, call, mine))

    def move_pages(self, command: tiers.Command, group: int) -> Future[list[bytes]] | None:
        """Hand a command for the page workers of an attention group on; the reports of the other
        ranks, packed, which are empty of ranks of other groups. None for one that is not
        answered."""
        call, theirs = -1, None
        if not isinstance(command, tiers.UNANSWERED):
            call, theirs = self._followers.expect()
        self._followers.tell(PAGES, msgspec.msgpack.encode((call, group, command)))
        return theirs

    def _finish(self, verb: str, args: dict[str, Any], call: int, mine: Future[Any]) -> Any:
        """Make what all ranks have prepared take effect; nowhere, if it fails on one of them."""
        answer, theirs = self._followers.expect()
        self._followers.tell(FINISH, msgspec.msgpack.encode((call, answer)))
        try:
            try:
                return mine.result()()
            finally:
                within(theirs, self._followers.limit_s, verb)
        except RankLost:
            raise
        except (RadixError, OSError):
            if verb in _UNDO:
                self.control(_UNDO[verb], args)
            raise


def within(answers: Future[list[Any]], limit_s: float, verb: str) -> list[Any]:
    """What the other ranks answer; RankLost when one of them does not within ``limit_s``."""
    try:
        return answers.result(limit_s)
    except TimeoutError:
        if answers.done():
            raise
        raise RankLost(f"a rank has not answered {verb!r} within {limit_s:g} s") from None


@contextmanager
def _together() -> Iterator[None]:
    """Where ranks wait for each other: an exception here leaves the others waiting, so that all of
    them have to be replaced."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        raise RankLost(f"rank 0: {type(error).__name__}: {error}") from error


def _merged(mine: Any, theirs: Sequence[Any]) -> Any:
    """The answer of all ranks: rank 0's, with the ``files`` that the others wrote and the memory
    that they use."""
    if isinstance(mine, dict) and "rss_bytes" in mine:
        return {**mine, "ranks": [mine, *theirs]}
    files = [
        name for answer in theirs if isinstance(answer, dict) for name in answer.get("files", ())
    ]
    return {**mine, "files": [*mine["files"], *files]} if files else mine


def _when_both(
    mine: Future[Any], theirs: Future[list[Any]], finish: Callable[[], Any]
) -> Future[Callable[[], Any]]:
    """A future of ``finish`` that is done when all ranks have prepared what a command asks for."""
    both: Future[Callable[[], Any]] = Future()

    def check(_: Future[Any]) -> None:
        with suppress(InvalidStateError):  # both may end at once
            if mine.done() and theirs.done():
                both.set_result(finish)

    mine.add_done_callback(check)
    theirs.add_done_callback(check)
    return both
