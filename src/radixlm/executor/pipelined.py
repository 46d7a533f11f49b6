"""PipelinedRunner: the runner of rank 0 where a replica has several pipeline stages.

``forward`` computes the first stage's part and hands it on. Logits and hidden states come back from
the last stage when other steps have been launched, so sampling waits for ``read``.

The results are received in a thread of their own: the last stage must not wait for rank 0 to take
them while rank 0 waits for room to hand on the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixlm.executor.results import StepHandle, needs_hidden, num_target_blocks
from radixlm.executor.runner import Runner, RunnerOptions, RunnerParts
from radixlm.kernels.ops.lora import LoraRows
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import StepPlan
from radixlm.step.result import HIDDEN, LOGITS, TAPS, TARGETS, StepResult


class LastStage(Protocol):
    """The last stage as rank 0 sees it. ``has_taps``: it sends what a drafter reads; ``confirms``:
    and at last a result of the kind ``done``."""

    has_taps: bool
    confirms: bool

    @property
    def done(self) -> str: ...

    @property
    def taking(self) -> ThreadPoolExecutor:
        """The thread that calls ``take_result``."""
        ...

    def take_result(self, kind: str) -> Tensor:
        """Wait for its next result of a kind. They come step by step: logits, hidden states, a
        drafter's, then the logits of prompt tokens, as far as they are wanted."""
        ...


class _Pending:
    """A step whose results are to come: what each is, and the result. ``done``: the kind of the one
    that stands for none."""

    def __init__(self, results: deque[tuple[str, Future[Tensor]]], done: str) -> None:
        self.results, self.done = results, done
        self.masks: Mapping[int, NDArray[np.int32]] = {}

    def take(self, kind: str) -> Tensor | None:
        """Wait for the next result, if it is of this kind."""
        if not self.results or self.results[0][0] != kind:
            return None
        return self.results.popleft()[1].result()


class PipelinedRunner(Runner):
    """Steps may be launched one after another before the first is read; they are read in order."""

    def __init__(self, parts: RunnerParts, options: RunnerOptions, last: LastStage) -> None:
        super().__init__(parts, options)
        self._last = last
        self._pending: dict[int, _Pending] = {}  # by plan index
        self._reader.target_logits = self._take_target_logits
        self._current: _Pending | None = None  # of the step that is read

    def forward(self, plan: StepPlan) -> StepHandle:
        """Compute the first stage's part of the step."""
        step = super().forward(plan)
        # the next step's inputs take the place of this one's
        step.inputs = copy(step.inputs)
        step.inputs.buffer = step.inputs.buffer.copy()
        wanted = [LOGITS] if step.shape.num_rows else []
        wanted += [HIDDEN] if needs_hidden(step.items) else []
        if self._tail is not None and step.batch is not None:
            step.batch = _kept(step.batch)
            wanted += [TAPS] if self._last.has_taps else []
        wanted += [TARGETS] * sum(map(num_target_blocks, step.items.prefills))
        if not wanted and self._last.confirms:  # pages count as computed when all stages have them
            wanted = [self._last.done]
        results = deque(
            (one, self._last.taking.submit(self._last.take_result, one)) for one in wanted
        )
        self._pending[plan.index] = _Pending(results, self._last.done)
        return step

    def sample(self, step: StepHandle, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Keep the masks for when the logits are there."""
        self._pending[step.plan.index].masks = masks

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the last stage, then sample."""
        pending = self._pending.pop(step.plan.index)
        step.logits_RV, step.hidden_TD = pending.take(LOGITS), pending.take(HIDDEN)
        if step.batch is not None:
            step.batch.taps_TN = pending.take(TAPS)
        pending.take(pending.done)
        super().sample(step, pending.masks)
        self._current = pending
        return super().read(step)

    def _take_target_logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        assert self._current is not None
        logits_RV = self._current.take(TARGETS)
        assert logits_RV is not None
        return logits_RV


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
