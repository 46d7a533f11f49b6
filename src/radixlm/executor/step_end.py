"""StepEnd: what a runner does at the end of each step, such as drafting the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixlm.executor.results import StepHandle
from radixlm.step.plan import PageCopy


class StepEnd(Protocol):
    """Has tables by slot and page beside the runner's."""

    def run(self, step: StepHandle) -> None:
        """Launch its work of a step, behind sampling. It may extend ``step.sampled_N`` by what the
        step's plan asks it for (``StepHandle.proposed_shape``)."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside its own pools."""

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
