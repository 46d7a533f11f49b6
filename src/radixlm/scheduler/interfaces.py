"""What a scheduler asks of features that have a place of their own in it: ``live_feed`` watches
it, ``step_sizes`` says how much a step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.replies import Moment, PageCounts

if TYPE_CHECKING:
    from radixlm.scheduler.commit import Committer
    from radixlm.scheduler.planner import Planner

Launch = tuple[float, float, float, float]
"""Times of a step: planning begins, it is planned, the model is launched (0: unknown), that has
ended."""


class StepRecorder(Protocol):
    """Records what steps took, and collects ``moments`` of requests for the next reply.

    num_prefilled  prompt tokens since the start
    forward_s      seconds of steps since the start, by kind of step
    """

    moments: list[Moment]
    num_prefilled: int
    forward_s: dict[str, float]

    def follow(self, planner: Planner, committer: Committer, clock: Callable[[], float]) -> None:
        """Record the steps of these from now on."""

    def announce(self, plan: StepPlan, now_s: float) -> bool:
        """Before a step that takes long, note the prompts that it computes; whether it is one."""

    def launched(self, launch: Launch, sample_s: float) -> None:
        """A step was launched, and from ``sample_s`` on its sampling."""

    def retracted(self, request: Request) -> None:
        """A request has lost its slot."""

    def committed(self, plan: StepPlan, result: StepResult, wait_s: float, read_s: float) -> None:
        """A step was committed for whose results the host waited from ``wait_s`` to ``read_s``."""

    def take(self) -> list[Moment]:
        """The moments since the last call."""

    def pages(self) -> PageCounts:
        """The pages of the KV cache now."""


class ChunkPacer(Protocol):
    """How many tokens of prompts a step computes beside requests that decode."""

    @property
    def is_for_readers(self) -> bool:
        """Whether only streams need their tokens in time; else every request does."""

    def tokens(self, num_decodes: int) -> int:
        """Tokens of prompts that the next step may compute beside ``num_decodes`` requests."""

    def observe(self, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """A step has ended: of ``num_decodes`` requests and ``num_tokens`` tokens of prompts."""


class ContinuousDecoding(Protocol):
    """How many tokens the rows of a step decode in turn."""

    def plan(self, batch: DecodeBatch) -> Drafts | None:
        """Further tokens for the rows of the batch, whose next tokens count as computed; these then
        count too. None: one pass."""

    def observe(
        self, items: Items, result: StepResult, seconds: float, model_s: float, sleep_s: float = 0.0
    ) -> float:
        """A step without prompts and drafts took so long, and the model's first pass ``model_s``.
        Returns the seconds of a pass, of steps with as many passes as are planned."""


class Preemption(Protocol):
    """Which running requests give way to waiting ones. ``blocked``: the one that found no room in
    the last step."""

    blocked: Request | None

    def begin_step(self) -> None:
        """Before the decodes are planned, since what is planned is in flight: retract a request,
        or have the step leave it out (``Planner.held``)."""

    def plan_turn(self, prefills: list[Item], now_s: float) -> bool:
        """Start a request in a step of its own, if one is to be; whether it was."""

    def sort(self, waiting: list[Request]) -> None:
        """Put a request in front that got another's place."""


class StageBatches(Protocol):
    """What a step may hold of several pipeline stages, which steps pass one after another."""

    def micro_batch(
        self, slots: Int64Array, is_decoding: NDArray[np.bool_], index: int
    ) -> NDArray[np.bool_]:
        """Which rows of those that could decode do so in step ``index``; none that is in flight."""

    def prompt_tokens(self, prefilling: list[Request], left: int) -> int:
        """The tokens of prompts that a step may have, ``left`` at most."""


class Deadlines(Protocol):
    """When waiting and running requests end, whatever they do."""

    def add(self, request: Request) -> None:
        """A request waits."""

    def expire(self, now_s: float) -> None:
        """End those whose time is over."""


class StepLog:
    """Told of steps and of rests between them, to write the log: this one writes nothing."""

    def resume(self, now_s: float) -> None:
        """A step begins."""

    def stepped(self, now_s: float) -> None:
        """A step was launched, and those were committed that are over."""

    def rest(self, now_s: float) -> None:
        """There is nothing to compute until ``resume``."""
