"""Drafting: what the scheduler asks for drafted tokens. A drafter is never a mode of the loop:
steps without drafts are planned and committed as ever."""

from __future__ import annotations

from typing import Protocol

from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int32Array
from radixlm.step.plan import DecodeBatch, Drafts, Items, StepPlan
from radixlm.step.result import Proposals, StepResult
from radixlm.wire.replies import DraftTotals


class DraftCounts(Protocol):
    """What became of drafts, of each request and of all."""

    totals: DraftTotals

    @property
    def accept_len(self) -> float:
        """Mean tokens of a step of a request that verified drafts."""

    def of(self, rid: str) -> tuple[list[int] | None, int]:
        """(rounds by the number of accepted drafts, drafted tokens) of a request; (None, 0)
        without a drafter."""


class Drafting(Protocol):
    """Called at the places of a step where drafts are asked for, and told what became of them."""

    @property
    def counts(self) -> DraftCounts: ...

    def register(self, request: Request) -> None:
        """A request has arrived."""

    def forget(self, request: Request) -> None:
        """A request is over."""

    def slide(self, request: Request, count: int) -> None:
        """``count`` tokens have left the request's streaming window."""

    def plan(self, batch: DecodeBatch, other_tokens: int) -> Drafts | None:
        """Drafts for the rows of the batch, whose next tokens count as computed; their drafts then
        count too. ``other_tokens``: tokens of the step's chunks."""

    def device_lens(self, items: Items) -> Int32Array | None:
        """How many tokens the device's drafter proposes after a step, by item that emits; None: it
        rests. Their pages are allocated."""

    def observe(self, items: Items, result: StepResult) -> None:
        """The results of a step that verified drafts."""

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long; one that goes on by itself, a pass of it."""

    def keep(self, items: Items, proposals: Proposals) -> None:
        """Keep what the device's drafter proposes, after the step's tokens were appended."""

    def flush(self) -> None:
        """Forget what requests have written that are over, and begin the means again."""
