"""PipelinedRunner: the runner of rank 0 where a replica has several pipeline stages.

``forward`` computes the first stage's part and hands it on. Logits and hidden states come back from
the last stage when other steps have been launched, so sampling waits for ``read``.

The results are received in a thread of their own: the last stage must not wait for rank 0 to take
them while rank 0 waits for room to hand on the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from radixlm.distributed.record import Choices, StepTokens, unpack_choices
from radixlm.executor.interfaces import ExpertChoices
from radixlm.executor.results import StepHandle
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.kernels.ops.lora import LoraRows
from radixlm.parallel.grouped_runner import GroupedRunner
from radixlm.step.batch import ForwardBatch
from radixlm.step.masks import Masks
from radixlm.step.plan import StepPlan
from radixlm.step.result import CHOICES, HIDDEN, LOGITS, TAPS, TARGETS, StepResult

if TYPE_CHECKING:
    from radixlm.models.stages import Pipeline


class _Pending:
    """A step whose results are to come: what each is, and the result. ``done``: the kind of the one
    that stands for none."""

    def __init__(
        self,
        results: deque[tuple[str, Future[Tensor]]],
        done: str,
        chosen: tuple[Choices, StepTokens] | None,
    ) -> None:
        """``chosen``: the experts that tokens chose in the first stage, and the tokens."""
        self.results, self.done, self.chosen = results, done, chosen
        self.masks = Masks()

    def take(self, kind: str) -> Tensor | None:
        """Wait for the next result, if it is of this kind; it is on the host."""
        if not self.results or self.results[0][0] != kind:
            return None
        return self.results.popleft()[1].result()


class PipelinedRunner(Runner):
    """Steps may be launched one after another before the first is read; they are read in order."""

    def __init__(
        self, parts: RunnerParts, options: RunnerOptions, last: Pipeline, **grouped: Any
    ) -> None:
        """``grouped``: the further arguments of a ``GroupedRunner``."""
        super().__init__(parts, options, **grouped)
        self._last = last
        self._pending: dict[int, _Pending] = {}  # by plan index
        self.outputs.target_logits = self._take_target_logits
        self._current: _Pending | None = None  # of the step that is read
        self._chosen: tuple[Choices, StepTokens] | None = None  # in the step that is launched

    def forward(self, plan: StepPlan) -> StepHandle:
        """Compute the first stage's part of the step."""
        self._chosen = None
        step = super().forward(plan)
        # the next step's inputs take the place of this one's
        step.inputs = copy(step.inputs)
        step.inputs.buffer = step.inputs.buffer.copy()
        wanted = [LOGITS] if step.shape.num_rows else []
        wanted += [HIDDEN] if self.outputs.are_wanted(step.items) else []
        if self.end is not None and step.batch is not None:
            step.batch = _kept(step.batch)
            wanted += [TAPS] if self._last.has_taps else []
        stages = [(one, -1) for one in wanted]
        if self._chosen is not None:
            stages += [(CHOICES, stage) for stage in range(1, self._last.num_stages)]
        stages += [(TARGETS, -1)] * self.outputs.num_head_runs(step.items)
        if not stages and self._last.confirms:  # pages count as computed when all stages have them
            stages = [(self._last.done, -1)]
        take, submit = self._last.take_result, self._last.taking.submit
        results = deque((one, submit(take, one, stage)) for one, stage in stages)
        self._pending[plan.index] = _Pending(results, self._last.done, self._chosen)
        return step

    def _tell(
        self,
        choices: ExpertChoices,
        step: StepHandle,
        chosen: Choices,
        tokens: Callable[[], StepTokens],
    ) -> None:
        """Keep what the first stage chose until the others' choices are there."""
        self._chosen = chosen, tokens()

    def sample(self, step: StepHandle, masks: Masks) -> None:
        """Keep the masks for when the logits are there."""
        self._pending[step.plan.index].masks = masks

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the last stage, then sample."""
        pending = self._pending.pop(step.plan.index)
        step.logits_RV, step.hidden_TD = self._put(pending, LOGITS), self._put(pending, HIDDEN)
        if step.batch is not None:
            step.batch.taps_TN = self._put(pending, TAPS)
        pending.take(pending.done)
        if self.choices is not None and pending.chosen is not None:
            chosen, tokens = pending.chosen
            while (theirs := pending.take(CHOICES)) is not None:
                chosen = [*chosen, *unpack_choices(theirs)]
            self.choices.tell(step, chosen, lambda: tokens)
        super().sample(step, pending.masks)
        self._current = pending
        return super().read(step)

    def _put(self, pending: _Pending, kind: str) -> Tensor | None:
        """The next result, if it is of this kind, on the device."""
        result = pending.take(kind)
        return None if result is None else result.to(self.device.where)

    def _take_target_logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        assert self._current is not None
        logits_RV = self._put(self._current, TARGETS)
        assert logits_RV is not None
        return logits_RV


class PipelinedGroupedRunner(PipelinedRunner, GroupedRunner):
    """Both: data-parallel attention in several stages."""


def _kept(batch: ForwardBatch) -> ForwardBatch:
    """The batch with tensors of its own."""
    kept = copy(batch)
    for one in fields(batch):
        value = getattr(batch, one.name)
        if isinstance(value, Tensor):
            setattr(kept, one.name, value.clone())
        elif one.name in ("page_table_GSP", "store_GT"):
            setattr(kept, one.name, tuple(tensor.clone() for tensor in value))
    return kept
