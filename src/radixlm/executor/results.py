"""ResultReader: turns what a step left on the device into the results of its items.

Legend: R rows with logits, T tokens, D model width.
"""

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

# rows of prompt logits computed at a time: a large vocabulary times a long chunk would be gigabytes
PROMPT_ROWS = 256
_NO_IDS = np.zeros(0, np.int32)
NOT_FINITE = "the model produced numbers that are not finite (NaN)"


class Head(Protocol):
    """The part of a model that turns hidden states into logits."""

    def logits(self, hidden_RD: Tensor) -> Tensor: ...


@dataclass(slots=True)
class StepHandle:
    """A launched step. Its tensors are valid once the device has computed them."""

    plan: StepPlan
    items: Items  # of the plan
    shape: StepShape
    hidden_TD: Tensor | None = None  # only where an item asks for more than tokens
    logits_RV: Tensor | None = None
    sampled_N: Tensor | None = None  # int32: R tokens, then marks of rows that are not finite
    logprobs: lp.Logprobs | DeviceLogprobs | None = None
    errors: dict[int, str] = field(default_factory=dict)  # by row of logits
    failed: dict[str, str] = field(default_factory=dict)  # by request id
    token_copy: AsyncCopy | None = None  # of sampled_N to the host
    done: Event | None = None  # behind the hidden states, where an item wants them


class ResultReader:
    """Waits for steps and makes their results."""

    def __init__(
        self, model: Head, tables: DeviceTables, sampling: SamplingTable, pooler: Pooler
    ) -> None:
        self._model, self._tables = model, tables
        self._sampling, self._pooler = sampling, pooler

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the step and return its results."""
        rows = step.shape.num_rows
        sampled = step.token_copy.wait() if step.token_copy is not None else _NO_IDS
        tokens, is_bad = sampled[:rows], sampled[rows:]
        if step.done is not None:
            step.done.wait()
        if isinstance(step.logprobs, DeviceLogprobs):  # copied before the tokens: they are there
            step.logprobs = step.logprobs.read()
        count = len(step.items.starts)
        prefills: list[ItemResult] = []
        if step.items.prefills:
            prefills = self._item_results(step, tokens, is_bad, count)
        detailed = {}
        has_more = step.hidden_TD is not None or step.logprobs is not None or step.errors
        if count and (has_more or step.failed or np.count_nonzero(is_bad[:count])):
            decodes = self._item_results(step, tokens, is_bad, 0, count)
            detailed = {i: one for i, one in enumerate(decodes) if not one.is_only_tokens}
        return StepResult(tokens[:count], detailed, prefills)

    @torch.inference_mode()
    def _item_results(
        self,
        step: StepHandle,
        tokens: Int32Array,
        is_bad: Int32Array,
        first: int,
        end: int | None = None,
    ) -> list[ItemResult]:
        """The results of the items [first, end), or of the prefills, which begin at ``first``; all
        items before ``first`` are decodes."""
        results: list[ItemResult] = []
        row = token_index = first
        items = step.items.prefills if end is None else step.items[first:end]
        for item in items:
            result = ItemResult()
            if item.emit:
                bad = bool(len(is_bad) and is_bad[row])
                self._set_token(step, item, row, int(tokens[row]), bad, result)
                row += 1
            if item.targets is not None or item.hidden_states or item.pooling:
                self._set_extras(step, item, token_index, result)
            if item.rid in step.failed:
                result = ItemResult(error=step.failed[item.rid])
            token_index += item.count
            results.append(result)
        return results

    def _set_token(
        self, step: StepHandle, item: Item, row: int, token: int, is_bad: bool, result: ItemResult
    ) -> None:
        if row in step.errors:
            result.error = step.errors[row]
        elif is_bad:
            result.error = _bad_row_message(self._sampling.states[item.slot])
        else:
            result.tokens = (token,)
            if step.logprobs is not None and item.logprobs is not None:
                result.logprobs = Logprobs(chosen=[], top=[], asked=[])
                assert isinstance(step.logprobs, lp.Logprobs)
                _append(result.logprobs, step.logprobs, row, token, item.logprobs)

    def _set_extras(self, step: StepHandle, item: Item, first: int, result: ItemResult) -> None:
        """Prompt log-probabilities, hidden states and pooled vectors of one item."""
        assert step.hidden_TD is not None
        hidden = step.hidden_TD[first : first + item.count]
        if item.targets is not None:
            result.prompt_logprobs = self._prompt_logprobs(hidden, item)
        if item.hidden_states:
            result.hidden_states = hidden.float().cpu().numpy().tobytes()
        if item.pooling:
            total = self._tables.state(item.slot).prompt_len
            result.pooled = self._pooler.add(item, hidden, total)
            if result.pooled is not None and not all(map(math.isfinite, result.pooled)):
                result.error = NOT_FINITE

    def _prompt_logprobs(self, hidden: Tensor, item: Item) -> Logprobs:
        assert item.targets is not None and item.logprobs is not None
        whole = Logprobs(chosen=[], top=[], asked=[])
        if item.start + item.targets_at == 0 and item.logprobs.prompt_from == 0:
            whole.chosen.append((None, int(item.tokens[0]) if item.tokens is not None else 0))
            whole.top.extend([None] if item.logprobs.top else [])
            whole.asked.extend([None] if item.logprobs.token_ids else [])
        wanted = plain_ids(item.targets).astype(np.int64)
        targets = torch.from_numpy(wanted).to(hidden.device)
        request = logprob_request(item.logprobs)
        for first in range(0, len(targets), PROMPT_ROWS):
            part = targets[first : first + PROMPT_ROWS]
            begin = item.targets_at + first
            logits = self._model.logits(hidden[begin : begin + len(part)])
            found = lp.compute_logprobs(logits, part, [request] * len(part))
            for row, token in enumerate(part.tolist()):
                _append(whole, found, row, token, item.logprobs)
        return whole


def _bad_row_message(state: SlotState | None) -> str:
    """Why no token can be sampled."""
    if state is not None and state.processor is not None:
        return f"logit processor {state.processor.name!r} left no token that may come next"
    return f"{NOT_FINITE}, or bad_words leave no token"


def logprob_request(need: LogprobParams) -> lp.LogprobRequest:
    """The request's parameters as the sampler takes them."""
    return lp.LogprobRequest(need.top, need.token_ids)


def _append(whole: Logprobs, found: lp.Logprobs, row: int, token: int, need: LogprobParams) -> None:
    """Add one token; "top" and "asked" only where the request wants them."""
    whole.chosen.append((found.chosen[row], token))
    if need.top:
        whole.top.append(list(zip(*found.top[row], strict=True)))
    if need.token_ids:
        whole.asked.append(list(zip(*found.of_token_ids[row], strict=True)))
