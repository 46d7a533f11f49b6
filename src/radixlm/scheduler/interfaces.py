"""What watches a scheduler: ``live_feed`` has what implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from radixlm.scheduler.commit import Committer
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.step.plan import StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.replies import Moment, PageCounts

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
