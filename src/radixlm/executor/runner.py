"""The tensor side of one replica: StepPlan in, StepResult out.

``forward`` launches, ``sample`` turns logits into tokens (which stay on the device for the next
step), ``read`` brings them to the host. On a CPU each is done when it returns.

Legend: R rows with logits, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.executor.media import MediaRows
from radixlm.executor.pooling import Pooler
from radixlm.executor.prepare import prepare
from radixlm.executor.tables import SlotTables
from radixlm.pools.state import StatePool
from radixlm.sampling import logprobs as lp
from radixlm.sampling.processors import LogitProcessors
from radixlm.sampling.sampler import Sampler
from radixlm.sampling.tensors import SamplingTable, SlotState
from radixlm.step.batch import AttentionRunner, ForwardBatch
from radixlm.step.plan import Item, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.media import plain_ids
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import LogprobNeed

# logits of prompt places are made so many rows at a time: a large vocabulary times a long chunk
# would be gigabytes
PROMPT_ROWS = 256
STATE_SPACE = 1  # the page space whose pages hold states


class Model(Protocol):
    """What the runner asks of a model."""

    def step(
        self, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def logits(self, hidden_RD: Tensor) -> Tensor: ...


class Attention(AttentionRunner, Protocol):
    """The attention backend: told of each step before its layers run."""

    def begin(self, batch: ForwardBatch) -> None: ...


@dataclass(slots=True)
class Step:
    """A step under way."""

    plan: StepPlan
    batch: ForwardBatch
    hidden_TD: Tensor | None  # only where an item asks for more than tokens
    logits_RV: Tensor | None
    tokens_R: Tensor | None = None
    logprobs: lp.Logprobs | None = None
    is_bad_R: Tensor | None = None
    errors: dict[int, str] = field(default_factory=dict)  # of rows with logits


class Runner:
    """Owns the device tables, the sampler's tables and the model."""

    def __init__(
        self,
        model: Model,
        attn: Attention,
        tables: SlotTables,
        sampling: SamplingTable,
        space_of_group: tuple[int, ...],
        page_size: int,
        eos_ids: tuple[int, ...],
        controls: Mapping[str, Any] | None = None,
        processors: LogitProcessors | None = None,
        pooler: Pooler | None = None,
        media: MediaRows | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.model, self.attn, self.tables = model, attn, tables
        self.states = states
        self.sampling, self.sampler = sampling, Sampler(sampling, detect_bad=True)
        self.space_of_group, self.page_size, self.eos_ids = space_of_group, page_size, eos_ids
        self.pooler = pooler or Pooler()
        self.processors = processors or LogitProcessors()
        self.media = media
        self._controls = dict(controls or {})

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Step:
        """Apply the plan's updates to the tables, then run the model."""
        for slot in plan.releases:
            state = self.tables.states[slot]
            if state is not None:
                self.pooler.forget(state.rid)
            self.tables.release(slot)
            self.sampling.clear(slot)
        for admission in plan.admissions:
            self.tables.admit(admission)
            self.sampling.set(
                admission.slot,
                admission.sampling,
                plain_ids(admission.prompt_ids).tolist(),
                admission.output_ids.tolist(),
                self.eos_ids,
                processor=self.processors.get(admission.processor) if admission.processor else None,
                rid=admission.rid,
            )
        for update in plan.pages:
            self.tables.write(update)
        batch = prepare(plan, self.tables, self.space_of_group, self.page_size, self.attn)
        if self.media is not None:
            self.media.put(plan, self.tables, batch)
        if self.states is not None:
            self._begin_states(plan, batch, self.states)
        self.attn.begin(batch)
        need_hidden = any(i.targets is not None or i.hidden_states or i.pooling for i in plan.items)
        hidden_TD, logits_RV = self.model.step(batch, need_hidden)
        return Step(plan, batch, hidden_TD, logits_RV)

    def _begin_states(self, plan: StepPlan, batch: ForwardBatch, states: StatePool) -> None:
        """Tell the recurrent layers which rows of their pool the step reads and writes."""
        items = plan.items
        slots, starts, counts = (
            np.fromiter((getattr(item, name) for item in items), np.int64, len(items))
            for name in ("slot", "start", "count")
        )
        table = self.tables.pages[STATE_SPACE][slots].astype(np.int64)
        batch.states = states.begin(table, starts, counts)

    @torch.inference_mode()
    def sample(self, step: Step, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Draw a token for each emitting item and write it to the token table."""
        if step.logits_RV is None:
            return
        emitting = [(i, item) for i, item in enumerate(step.plan.items) if item.emit]
        slots = [item.slot for _, item in emitting]
        positions_R = step.batch.positions_T[step.batch.logits_rows_R] + 1
        mask_RW = self._mask([index for index, _ in emitting], masks)
        needs = [item.logprobs for _, item in emitting]
        wanted = None
        if any(need is not None for need in needs):
            wanted = [_request(need) if need else None for need in needs]
        drawn = self.sampler.sample(step.logits_RV, slots, positions_R, mask_RW, wanted)
        step.tokens_R, step.is_bad_R, step.logprobs = drawn.tokens_R, drawn.is_bad_R, drawn.logprobs
        step.errors = drawn.errors
        self.tables.next_token[slots] = drawn.tokens_R

    def _mask(self, order: list[int], masks: Mapping[int, NDArray[np.int32]]) -> Tensor | None:
        if not masks:
            return None
        width = len(next(iter(masks.values())))
        rows = np.full((len(order), width), -1, np.int32)
        for row, index in enumerate(order):
            if index in masks:
                rows[row] = masks[index]
        return torch.from_numpy(rows).to(self.tables.device)

    @torch.inference_mode()
    def read(self, step: Step) -> StepResult:
        """Wait for the step; what it produced, as numbers."""
        tokens = step.tokens_R.tolist() if step.tokens_R is not None else []
        bad = step.is_bad_R.tolist() if step.is_bad_R is not None else []
        results: list[ItemResult] = []
        row = at = 0
        for item in step.plan.items:
            got = ItemResult()
            if item.emit:
                if row in step.errors:
                    got.error = step.errors[row]
                elif bad[row]:
                    got.error = _why_bad(self.sampling.states[item.slot])
                else:
                    got.tokens = (tokens[row],)
                    if step.logprobs is not None and item.logprobs is not None:
                        got.logprobs = Logprobs(chosen=[], top=[], asked=[])
                        _append(got.logprobs, step.logprobs, row, tokens[row], item.logprobs)
                row += 1
            if item.targets is not None or item.hidden_states or item.pooling:
                self._extras(step, item, at, got)
            at += item.count
            results.append(got)
        return StepResult(results)

    def _extras(self, step: Step, item: Item, at: int, got: ItemResult) -> None:
        """Prompt log-probabilities, hidden states and pooled vectors of one item."""
        assert step.hidden_TD is not None
        hidden = step.hidden_TD[at : at + item.count]
        if item.targets is not None:
            got.prompt_logprobs = self._prompt_logprobs(hidden, item)
        if item.hidden_states:
            got.hidden_states = hidden.float().cpu().numpy().tobytes()
        if item.pooling:
            total = self.tables.state(item.slot).prompt_len
            got.pooled = self.pooler.add(item, hidden, total)
            if got.pooled is not None and not all(map(math.isfinite, got.pooled)):
                got.error = "the model produced numbers that are not finite (NaN)"

    def _prompt_logprobs(self, hidden: Tensor, item: Item) -> Logprobs:
        assert item.targets is not None and item.logprobs is not None
        whole = Logprobs(chosen=[], top=[], asked=[])
        if item.start + item.targets_at == 0 and item.logprobs.prompt_from == 0:
            whole.chosen.append((None, int(item.tokens[0]) if item.tokens is not None else 0))
            whole.top.extend([None] if item.logprobs.top else [])
            whole.asked.extend([None] if item.logprobs.token_ids else [])
        wanted = plain_ids(item.targets).astype(np.int64)
        targets = torch.from_numpy(wanted).to(hidden.device)
        request = _request(item.logprobs)
        for first in range(0, len(targets), PROMPT_ROWS):
            part = targets[first : first + PROMPT_ROWS]
            begin = item.targets_at + first
            logits = self.model.logits(hidden[begin : begin + len(part)])
            found = lp.compute_logprobs(logits, part, [request] * len(part))
            for row, token in enumerate(part.tolist()):
                _append(whole, found, row, token, item.logprobs)
        return whole

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """An operator's wish that concerns tensors."""
        if verb not in self._controls:
            raise InvalidRequest(f"the engine knows no {verb!r}", param="verb")
        return self._controls[verb](args)


def _why_bad(state: SlotState | None) -> str:
    """Why no token can be chosen."""
    if state is not None and state.processor is not None:
        return f"logit processor {state.processor.name!r} left no token that may come next"
    return "the model produced numbers that are not finite (NaN)"


def _request(need: LogprobNeed) -> lp.LogprobRequest:
    return lp.LogprobRequest(need.top, need.token_ids)


def _append(whole: Logprobs, found: lp.Logprobs, row: int, token: int, need: LogprobNeed) -> None:
    """Add one place; "top" and "asked" only where the request wants them."""
    whole.chosen.append((found.chosen[row], token))
    if need.top:
        whole.top.append(list(zip(*found.top[row], strict=True)))
    if need.token_ids:
        whole.asked.append(list(zip(*found.given[row], strict=True)))
