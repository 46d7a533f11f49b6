"""ResultReader: turns what a step left on the device into the results of its items.

Legend: R rows with logits, T tokens, D model width, N sequences with results, A with logits (of
further paths of drafts too), W words of token masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor.device import AsyncCopy, Event
from radixlm.executor.device_tables import DeviceTables
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
from radixlm.wire.media import plain_ids
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import LogprobParams

# rows of prompt logits computed at a time: a large vocabulary times a long chunk would be gigabytes
PROMPT_ROWS = 256
_NO_IDS = np.zeros(0, np.int32)
NOT_FINITE = "the model produced numbers that are not finite (NaN)"


class Head(Protocol):
    """The part of a model that turns hidden states into logits."""

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor: ...


class Pooler(Protocol):
    """Turns hidden states into one vector or some scores a request."""

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        """The vector or the scores once the last chunk has come, else None."""

    def rows(self, hidden_CD: Tensor) -> Tensor:
        """float32 [C, O]: the vectors or the scores of a chunk's tokens."""


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

    def __init__(
        self, model: Head, tables: DeviceTables, sampling: SamplingTable, pooler: Pooler | None
    ) -> None:
        self.target_logits, self._tables = model.logits, tables
        self._sampling, self._pooler = sampling, pooler

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
            if item.targets is not None or _wants_rows(item) or item.pooling:
                self._set_extras(step, item, at, count, result)
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
                _append(logprobs, step.logprobs, row, token, item.logprobs)

    def _set_extras(
        self, step: StepHandle, item: Item, first: int, count: int, result: ItemResult
    ) -> None:
        """Prompt log-probabilities, hidden states and pooled vectors of one item, of its ``count``
        tokens from ``first`` on."""
        hidden, lora = self._rows_of(step, first, count)
        if item.targets is not None:
            result.prompt_logprobs = self._prompt_logprobs(hidden, item, lora)
        if _wants_rows(item):
            result.hidden_states = _row_bytes(step, item, hidden, first)
        if item.pooling:
            self._set_pooled(item, hidden, result)

    def _set_pooled(self, item: Item, hidden: Tensor, result: ItemResult) -> None:
        """The pooled vector of a prompt, or the rows of a chunk's tokens."""
        total = self._tables.state(item.slot).prompt_len
        assert self._pooler is not None and item.pooling is not None, "the runner has no pooler"
        if item.pooling.per_token:
            rows = self._pooler.rows(hidden).cpu()
            result.hidden_states = rows.numpy().tobytes()
            result.pooled = [] if item.start + item.count >= total else None
            is_finite = bool(rows.isfinite().all())
        else:
            result.pooled = self._pooler.add(item, hidden, total)
            is_finite = all(map(math.isfinite, result.pooled or ()))
        if not is_finite:
            result.error = NOT_FINITE

    @staticmethod
    def _rows_of(step: StepHandle, first: int, count: int) -> tuple[Tensor, LoraRows | None]:
        """Hidden states of ``count`` tokens from ``first`` on, and their adapters."""
        assert step.hidden_TD is not None
        hidden = step.hidden_TD[first : first + count]
        if step.lora is None:
            return hidden, None
        return hidden, step.lora.select(torch.arange(first, first + count, device=hidden.device))

    def _prompt_logprobs(self, hidden: Tensor, item: Item, lora: LoraRows | None) -> Logprobs:
        assert item.targets is not None and item.logprobs is not None
        whole = Logprobs()
        if item.start + item.targets_at == 0 and item.logprobs.prompt_from == 0:
            whole.chosen.append((None, int(item.tokens[0]) if item.tokens is not None else 0))
            whole.top.extend([None] if item.logprobs.top else [])
            whole.asked.extend([None] if item.logprobs.token_ids else [])
        wanted = plain_ids(item.targets).astype(np.int64)
        targets = torch.from_numpy(wanted).to(hidden.device)
        request = logprob_request(item.logprobs)
        for first, logits in self._target_logits(hidden, item, lora):
            part = targets[first : first + len(logits)]
            found = lp.compute_logprobs(logits, part, [request] * len(part))
            for row, token in enumerate(part.tolist()):
                _append(whole, found, row, token, item.logprobs)
        return whole

    def _target_logits(
        self, hidden: Tensor, item: Item, lora: LoraRows | None
    ) -> Iterator[tuple[int, Tensor]]:
        """The logits [up to PROMPT_ROWS, V] from which an item's targets are drawn, each with the
        index of its first target."""
        assert item.targets is not None
        for first in range(0, len(item.targets), PROMPT_ROWS):
            count = min(PROMPT_ROWS, len(item.targets) - first)
            begin = item.targets_at + first
            rows = hidden[begin : begin + count]
            of_rows = None
            if lora is not None:
                places = torch.arange(begin, begin + count, device=rows.device)
                of_rows = lora.select(places)
            yield first, self.target_logits(rows, of_rows)

    @torch.inference_mode()
    def follow(self, step: StepHandle) -> None:
        """Run the head where ``read`` does, for ranks that hold a part of it."""
        if step.hidden_TD is None:
            return
        first = int(step.items.num_tokens) - sum(item.count for item in step.items.others)
        for item in step.items.prefills:
            if item.targets is not None:
                hidden, lora = self._rows_of(step, first, item.count)
                for _ in self._target_logits(hidden, item, lora):
                    pass
            first += item.count


def needs_hidden(items: Items) -> bool:
    """Whether an item asks for more than what logits tell."""
    return bool(items.decodes.hidden or items.decodes.routed) or any(
        i.targets is not None or _wants_rows(i) or i.pooling for i in items.prefills
    )


def wants_routed(items: Items) -> bool:
    """Whether an item asks for the experts that its tokens choose."""
    return bool(items.decodes.routed) or any(item.routed_experts for item in items.prefills)


def _wants_rows(item: Item) -> bool:
    return item.hidden_states or item.routed_experts


def _row_bytes(step: StepHandle, item: Item, hidden_CD: Tensor, first: int) -> bytes:
    """What an item wants of each of its tokens, which begin at ``first``."""
    parts = []
    if item.hidden_states:
        parts.append(hidden_CD.float().cpu().view(torch.uint8))
    if item.routed_experts:
        assert step.routed_TLK is not None, "the step has not kept what its tokens chose"
        routed_CN = step.routed_TLK[first : first + len(hidden_CD)].flatten(1)
        parts.append(routed_CN.cpu().view(torch.uint8))
    return torch.cat(parts, 1).numpy().tobytes()


def reads_head(step: StepHandle) -> bool:
    """Whether reading the step runs the head: for log-probabilities of prompts."""
    return any(item.targets is not None for item in step.items.prefills)


def num_target_blocks(item: Item) -> int:
    """How often the head runs for an item's prompt log-probabilities."""
    return 0 if item.targets is None else -(-len(item.targets) // PROMPT_ROWS)


def _bad_row_message(state: SlotState | None) -> str:
    """Why no token can be sampled."""
    if state is not None and state.processors:
        return f"logit processor {state.processors[0][0].name!r} left no token that may come next"
    return f"{NOT_FINITE}, or bad_words leave no token"


def logprob_request(need: LogprobParams) -> lp.LogprobRequest:
    """The request's parameters as the sampler takes them."""
    return lp.LogprobRequest(need.top, need.token_ids, need.kept, need.entropy)


def _append(whole: Logprobs, found: lp.Logprobs, row: int, token: int, need: LogprobParams) -> None:
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
