"""ResultReader: turns what a step left on the device into the results of its items.

Legend: R rows with logits, T tokens, D model width, N sequences with results, A with logits (of
further paths of drafts too), W words of token masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.devices.copies import AsyncCopy
from radixlm.devices.device import Event
from radixlm.executor.step_inputs import StepInputs
from radixlm.executor.step_layout import StepShape
from radixlm.kernels.ops.lora import LoraRows
from radixlm.sampling import logprobs as lp
from radixlm.sampling.cuda import DeviceLogprobs
from radixlm.sampling.drafts import Accepted, DraftRows
from radixlm.sampling.table import SamplingTable, SlotState
from radixlm.step.batch import ForwardBatch
from radixlm.step.masks import Masks
from radixlm.step.plan import Int32Array, Item, Items, StepPlan
from radixlm.step.result import ItemResult, Proposals, StepResult
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import LogprobParams

_NO_IDS = np.zeros(0, np.int32)
NOT_FINITE = "the model produced numbers that are not finite (NaN)"


class Head(Protocol):
    """The part of a model that turns hidden states into logits."""

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor: ...


class HiddenOutputs:
    """What requests want besides their tokens and is made of hidden states: here nothing."""

    target_logits: Callable[[Tensor, LoraRows | None], Tensor]  # the head

    def are_wanted(self, items: Items) -> bool:
        """Whether an item asks for more than what logits tell."""
        return False

    def add(self, step: StepHandle, item: Item, first: int, count: int, result: ItemResult) -> None:
        """Add to an item's result what it asks for, of its ``count`` tokens from ``first`` on."""

    def num_head_runs(self, items: Items) -> int:
        """How often reading a step runs the head."""
        return 0

    def follow(self, step: StepHandle) -> None:
        """Run the head where ``add`` does, for ranks that hold a part of it."""

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""


@dataclass(slots=True)
class StepHandle:
    """A launched step. Its tensors are valid once the device has computed them.

    sampled_N  int32: R tokens, R marks of rows that are not finite, with drafts the tokens that
               each sequence produced, and with further paths which of them gave these; then the
               drafter's tokens and the bits of their survival, and of trees the parents
    tree_size  drafts of a tree of the drafter; 0: it drafts chains
    """

    plan: StepPlan
    items: Items  # of the plan
    shape: StepShape
    inputs: StepInputs
    lora: LoraRows | None = None  # tokens with adapters
    batch: ForwardBatch | None = None  # for the drafter
    drafts: DraftRows | None = None
    accepted: Accepted | None = None
    hidden_TD: Tensor | None = None  # only where an item asks for more than tokens
    routed_TLK: Tensor | None = None  # int32, chosen experts, only where an item asks for them
    logits_RV: Tensor | None = None
    sampled_N: Tensor | None = None
    logprobs: lp.Logprobs | DeviceLogprobs | None = None
    errors: dict[int, str] = field(default_factory=dict)  # by row of logits
    failed: dict[str, ItemResult] = field(default_factory=dict)  # by request id
    token_copy: AsyncCopy | None = None  # of sampled_N to the host
    launched_s: float = 0.0  # when the model was launched, monotonic
    more_N: Int32Array | None = None  # tokens behind the first that the rows go on to
    done: Event | None = None  # behind the hidden states, where an item wants them
    tree_size: int = 0

    @property
    def proposed_shape(self) -> tuple[int, int, int]:
        """Numbers that the drafter gives of a draft, rows, and drafts of each; drafts that are not
        wanted included. (0, 0, 0): it proposes nothing."""
        lens = self.plan.draft_lens
        most = 0 if lens is None else int(lens.max(initial=0))
        if lens is None or not most:
            return 0, 0, 0
        return (3, len(lens), self.tree_size) if self.tree_size else (2, len(lens), most)

    @property
    def num_counted(self) -> int:
        """Numbers that tell how many of the rows of logits stand."""
        if self.shape.first_A1 is None:
            return 0
        return self.shape.num_results * (1 if self.shape.owners_P is None else 2)

    def first_rows(self, device: torch.device) -> Tensor:
        """The first row of logits of each result, with drafts: int64 [N]."""
        assert self.shape.first_A1 is not None
        first_A = torch.from_numpy(self.shape.first_A1[:-1]).to(device, non_blocking=True)
        chosen_N = None if self.accepted is None else self.accepted.chosen_N
        return first_A if chosen_N is None else first_A[chosen_N]

    def sampled(self) -> Tensor:
        """What was sampled, once it is."""
        assert self.sampled_N is not None
        return self.sampled_N

    def wanted_logprobs(self) -> list[LogprobParams | None]:
        """What is wanted of each row of logits besides its token."""
        wanted = [item.logprobs for item in self.items if item.emit]
        if self.drafts is None:
            return wanted
        return [wanted[n] for n in self.drafts.sequence_R.tolist()]

    def token_mask(self, masks: Masks, is_pinned: bool) -> Tensor | None:
        """The masks by item as int32 [R, W], in a host tensor of this step's own."""
        if not masks:
            return None
        shape, order = self.shape, [i for i, item in enumerate(self.items) if item.emit]
        first = np.arange(shape.num_rows + 1) if shape.first_A1 is None else shape.first_A1
        width = next(iter(masks.values())).shape[-1]
        rows = np.full((shape.num_rows, width), -1, np.int32)
        for n, index in enumerate(order):
            if index in masks:
                mask_KW = np.atleast_2d(masks[index])  # of each place, or one for all
                end = first[n] + len(mask_KW) if len(mask_KW) > 1 else first[n + 1]
                rows[first[n] : end] = mask_KW
        mask = torch.from_numpy(rows)
        return mask.pin_memory() if is_pinned else mask


class _SampledRows(Record, eq=False):
    """``tokens`` and ``is_bad`` [R] (or empty: none is) by row of logits. With drafts, the rows of
    sequence n are the ``counts_N[n]`` from ``first_N[n]`` on; else it has row n. ``winners``: by
    sequence, further paths of drafts that gave its tokens."""

    tokens: Int32Array
    is_bad: Int32Array
    first_N: NDArray[np.int64] | None
    counts_N: Int32Array | None
    winners: Mapping[int, int]

    def rows_of(self, number: int) -> range:
        """The rows of a sequence that gave a token."""
        if self.first_N is None or self.counts_N is None:
            return range(number, number + 1)
        first = int(self.first_N[number])
        return range(first, first + int(self.counts_N[number]))


def _proposals(step: StepHandle, proposed: Int32Array) -> Proposals:
    """What the drafter has written behind a step's tokens: [rows, K] tokens, then survivals, and of
    trees parents."""
    lens = step.plan.draft_lens
    assert lens is not None
    tokens_RK, bits_RK, *rest = proposed.reshape(step.proposed_shape)
    is_in_RK = np.arange(tokens_RK.shape[1]) < lens[:, None]
    if rest:
        is_in_RK, lens = tokens_RK >= 0, np.count_nonzero(tokens_RK >= 0, axis=1).astype(np.int32)
    survival = bits_RK.view(np.float32)[is_in_RK]
    return Proposals(lens, tokens_RK[is_in_RK], survival, rest[0][is_in_RK] if rest else None)


def _sampled_rows(
    step: StepHandle, tokens: Int32Array, is_bad: Int32Array, counted: Int32Array
) -> _SampledRows:
    """The rows that gave tokens; ``counted``: what tells how many stand, and of which path."""
    first_A1, num = step.shape.first_A1, step.shape.num_results
    if first_A1 is None:
        return _SampledRows(tokens, is_bad, None, None, {})
    chosen_N = counted[num:] if step.shape.owners_P is not None else np.arange(num)
    winners = {n: int(chosen_N[n]) - num for n in np.flatnonzero(chosen_N >= num).tolist()}
    return _SampledRows(tokens, is_bad, first_A1[chosen_N], counted[:num], winners)


class ResultReader:
    """Waits for steps and makes their results."""

    def __init__(self, sampling: SamplingTable, outputs: HiddenOutputs) -> None:
        self._sampling, self._outputs = sampling, outputs

    def read(self, step: StepHandle) -> StepResult:
        """Wait for the step and return its results."""
        rows = step.shape.num_rows
        sampled = step.token_copy.wait() if step.token_copy is not None else _NO_IDS
        proposals = None
        if num_proposed := math.prod(step.proposed_shape):
            sampled, proposed = np.split(sampled, [-num_proposed])
            proposals = _proposals(step, proposed)
        end = len(sampled) - step.num_counted
        is_bad = sampled[rows:end]
        sampled_rows = _sampled_rows(step, sampled[:rows], is_bad, sampled[end:])
        if step.done is not None:
            step.done.wait()
        if isinstance(step.logprobs, DeviceLogprobs):  # copied before the tokens: they are there
            step.logprobs = step.logprobs.read()
        count = len(step.items.starts)
        prefills: list[ItemResult] = []
        if step.items.prefills:
            prefills = self._item_results(step, sampled_rows, count)
        detailed = {}
        has_more = step.hidden_TD is not None or step.logprobs is not None or step.errors
        if count and (has_more or step.failed or np.count_nonzero(is_bad)):
            decodes = self._item_results(step, sampled_rows, 0, count)
            detailed = {i: one for i, one in enumerate(decodes) if not one.is_only_tokens}
        first_N, counts_N = sampled_rows.first_N, sampled_rows.counts_N
        if first_N is None or counts_N is None:
            tokens = sampled_rows.tokens[:count]
            return StepResult(tokens, detailed, prefills, None, proposals)
        counts = counts_N[:count]
        before = np.cumsum(counts) - counts
        kept = np.repeat(first_N[:count] - before, counts) + np.arange(counts.sum())
        tokens, winners = sampled_rows.tokens[kept], sampled_rows.winners
        return StepResult(tokens, detailed, prefills, counts, proposals, winners)

    @torch.inference_mode()
    def _item_results(
        self, step: StepHandle, sampled: _SampledRows, first: int, end: int | None = None
    ) -> list[ItemResult]:
        """The results of the items [first, end), or of the prefills, which begin at ``first``; all
        items before ``first`` are decodes."""
        results: list[ItemResult] = []
        number = first  # of the sequences with results
        token_index, items = 0, step.items[first:end]
        if end is None:
            items = step.items.prefills
            token_index = step.shape.num_tokens - sum(item.count for item in step.items.others)
        for item in items:
            result, count, at = ItemResult(), item.count, token_index
            if item.emit:
                self._set_tokens(step, item, sampled, sampled.rows_of(number), result)
                if (winner := sampled.winners.get(number)) is not None:
                    rest = step.items.paths[winner:]
                    at = step.shape.num_tokens - sum(path.count for path in rest)
                number += 1
                if item.tokens is None:
                    count = len(result.tokens)
            self._outputs.add(step, item, at, count, result)
            if item.rid in step.failed:
                result = step.failed[item.rid]
            token_index += item.count
            results.append(result)
        return results

    def _set_tokens(
        self, step: StepHandle, item: Item, sampled: _SampledRows, rows: range, result: ItemResult
    ) -> None:
        """Set the tokens of an item's rows, up to one that failed."""
        logprobs = None
        if step.logprobs is not None and item.logprobs is not None:
            logprobs = result.logprobs = Logprobs()
        for row in rows:
            if row in step.errors:
                result.error = step.errors[row]
            elif len(sampled.is_bad) and sampled.is_bad[row]:
                result.error = _bad_row_message(self._sampling.states[item.slot])
            if result.error is not None:
                break
            token = int(sampled.tokens[row])
            result.tokens += (token,)
            if logprobs is not None and item.logprobs is not None:
                assert isinstance(step.logprobs, lp.Logprobs)
                append_logprobs(logprobs, step.logprobs, row, token, item.logprobs)


def _bad_row_message(state: SlotState | None) -> str:
    """Why no token can be sampled."""
    if state is not None and state.processors:
        return f"logit processor {state.processors[0][0].name!r} left no token that may come next"
    return f"{NOT_FINITE}, or bad_words leave no token"


def logprob_request(need: LogprobParams) -> lp.LogprobRequest:
    """The request's parameters as the sampler takes them."""
    return lp.LogprobRequest(need.top, need.token_ids, need.kept, need.entropy)


def append_logprobs(
    whole: Logprobs, found: lp.Logprobs, row: int, token: int, need: LogprobParams
) -> None:
    """Add one token; "top" and "asked" only where the request wants them."""
    whole.chosen.append((found.chosen[row], token))
    if need.top:
        whole.top.append(list(zip(*found.top[row], strict=True)))
    if need.token_ids:
        whole.asked.append(list(zip(*found.of_token_ids[row], strict=True)))
    if row in found.kept:
        whole.kept.append(found.kept[row])
    if row in found.entropy:
        whole.entropy.append(found.entropy[row])
