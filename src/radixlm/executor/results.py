"""From what a step left on the device to what each item gets.

Legend: R rows with logits, T tokens, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from radixlm.executor.device import AsyncCopy, Event
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.pooling import Pooler
from radixlm.executor.step_layout import StepShape
from radixlm.sampling import logprobs as lp
from radixlm.sampling.cuda import DeviceLogprobs
from radixlm.sampling.table import SamplingTable, SlotState
from radixlm.step.plan import Int32Array, Item, Items, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.media import plain_ids
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import LogprobParams

# logits of prompt places are made so many rows at a time: a large vocabulary times a long chunk
# would be gigabytes
PROMPT_ROWS = 256
_NO_IDS = np.zeros(0, np.int32)
NOT_FINITE = "the model produced numbers that are not finite (NaN)"


class Head(Protocol):
    """The part of a model that turns hidden states into logits."""

    def logits(self, hidden_RD: Tensor) -> Tensor: ...


@dataclass(slots=True)
class StepHandle:
    """A step under way. The tensors are there once the device has got so far."""

    plan: StepPlan
    items: Items  # of the plan
    shape: StepShape
    hidden_TD: Tensor | None = None  # only where an item asks for more than tokens
    logits_RV: Tensor | None = None
    drawn_N: Tensor | None = None  # int32: R tokens, then marks of rows that are not finite
    logprobs: lp.Logprobs | DeviceLogprobs | None = None
    errors: dict[int, str] = field(default_factory=dict)  # of rows with logits
    failed: dict[str, str] = field(default_factory=dict)  # of requests, by id
    landing: AsyncCopy | None = None
    done: Event | None = None  # behind the hidden states, where they are wanted


class ResultReader:
    """Waits for steps and hands out what they made."""

    def __init__(
        self, model: Head, tables: DeviceTables, sampling: SamplingTable, pooler: Pooler
    ) -> None:
        self._model, self._tables = model, tables
        self._sampling, self._pooler = sampling, pooler

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the step; what it produced, as numbers."""
        rows = step.shape.num_rows
        drawn = step.landing.take() if step.landing is not None else _NO_IDS
        tokens, bad = drawn[:rows], drawn[rows:]
        if step.done is not None:
            step.done.wait()
        if isinstance(step.logprobs, DeviceLogprobs):  # their copies lie before the tokens'
            step.logprobs = step.logprobs.read()
        count = len(step.items.starts)
        others: list[ItemResult] = []
        if step.items.prefills:
            others = self._each(step, tokens, bad, count)
        odd = {}
        is_odd = step.hidden_TD is not None or step.logprobs is not None or step.errors
        if count and (is_odd or step.failed or np.count_nonzero(bad[:count])):
            lone = self._each(step, tokens, bad, 0, count)
            odd = {i: got for i, got in enumerate(lone) if not got.is_single_token}
        return StepResult(tokens[:count], odd, others)

    @torch.inference_mode()
    def _each(
        self,
        step: StepHandle,
        tokens: Int32Array,
        bad: Int32Array,
        first: int,
        end: int | None = None,
    ) -> list[ItemResult]:
        """The results of the items [first, end), or of the others, from ``first`` on; those before
        ``first`` are decodes."""
        results: list[ItemResult] = []
        row = at = first
        items = step.items.prefills if end is None else step.items[first:end]
        for item in items:
            got = ItemResult()
            if item.emit:
                is_bad = bool(len(bad) and bad[row])
                self._token(step, item, row, int(tokens[row]), is_bad, got)
                row += 1
            if item.targets is not None or item.hidden_states or item.pooling:
                self._extras(step, item, at, got)
            if item.rid in step.failed:
                got = ItemResult(error=step.failed[item.rid])
            at += item.count
            results.append(got)
        return results

    def _token(
        self, step: StepHandle, item: Item, row: int, token: int, is_bad: bool, got: ItemResult
    ) -> None:
        if row in step.errors:
            got.error = step.errors[row]
        elif is_bad:
            got.error = _why_bad(self._sampling.states[item.slot])
        else:
            got.tokens = (token,)
            if step.logprobs is not None and item.logprobs is not None:
                got.logprobs = Logprobs(chosen=[], top=[], asked=[])
                assert isinstance(step.logprobs, lp.Logprobs)
                _append(got.logprobs, step.logprobs, row, token, item.logprobs)

    def _extras(self, step: StepHandle, item: Item, at: int, got: ItemResult) -> None:
        """Prompt log-probabilities, hidden states and pooled vectors of one item."""
        assert step.hidden_TD is not None
        hidden = step.hidden_TD[at : at + item.count]
        if item.targets is not None:
            got.prompt_logprobs = self._prompt_logprobs(hidden, item)
        if item.hidden_states:
            got.hidden_states = hidden.float().cpu().numpy().tobytes()
        if item.pooling:
            total = self._tables.state(item.slot).prompt_len
            got.pooled = self._pooler.add(item, hidden, total)
            if got.pooled is not None and not all(map(math.isfinite, got.pooled)):
                got.error = NOT_FINITE

    def _prompt_logprobs(self, hidden: Tensor, item: Item) -> Logprobs:
        assert item.targets is not None and item.logprobs is not None
        whole = Logprobs(chosen=[], top=[], asked=[])
        if item.start + item.targets_at == 0 and item.logprobs.prompt_from == 0:
            whole.chosen.append((None, int(item.tokens[0]) if item.tokens is not None else 0))
            whole.top.extend([None] if item.logprobs.top else [])
            whole.asked.extend([None] if item.logprobs.token_ids else [])
        wanted = plain_ids(item.targets).astype(np.int64)
        targets = torch.from_numpy(wanted).to(hidden.device)
        request = request_of(item.logprobs)
        for first in range(0, len(targets), PROMPT_ROWS):
            part = targets[first : first + PROMPT_ROWS]
            begin = item.targets_at + first
            logits = self._model.logits(hidden[begin : begin + len(part)])
            found = lp.compute_logprobs(logits, part, [request] * len(part))
            for row, token in enumerate(part.tolist()):
                _append(whole, found, row, token, item.logprobs)
        return whole


def _why_bad(state: SlotState | None) -> str:
    """Why no token can be chosen."""
    if state is not None and state.processor is not None:
        return f"logit processor {state.processor.name!r} left no token that may come next"
    return NOT_FINITE


def request_of(need: LogprobParams) -> lp.LogprobRequest:
    """A request's wish as the sampler takes it."""
    return lp.LogprobRequest(need.top, need.token_ids)


def _append(whole: Logprobs, found: lp.Logprobs, row: int, token: int, need: LogprobParams) -> None:
    """Add one place; "top" and "asked" only where the request wants them."""
    whole.chosen.append((found.chosen[row], token))
    if need.top:
        whole.top.append(list(zip(*found.top[row], strict=True)))
    if need.token_ids:
        whole.asked.append(list(zip(*found.of_token_ids[row], strict=True)))
