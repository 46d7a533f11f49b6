"""HiddenReader: makes of a step's hidden states what its items ask for.

Legend: T tokens of a step, C those of a chunk, D model width, N values of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.results import (
    NOT_FINITE,
    Head,
    HiddenOutputs,
    StepHandle,
    append_logprobs,
    logprob_request,
)
from radixlm.kernels.ops.lora import LoraRows
from radixlm.sampling import logprobs as lp
from radixlm.step.plan import Item, Items
from radixlm.step.result import ItemResult
from radixlm.wire.media import plain_ids
from radixlm.wire.replies import Logprobs

# rows of prompt logits computed at a time: a large vocabulary times a long chunk would be gigabytes
PROMPT_ROWS = 256


class Pooler(Protocol):
    """Turns hidden states into one vector or some scores a request."""

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""

    def add(self, item: Item, hidden_TD: Tensor, prompt_len: int) -> list[float] | None:
        """The vector or the scores once the last chunk has come, else None."""

    def rows(self, hidden_CD: Tensor, is_raw: bool = False) -> Tensor:
        """float32 [C, O]: the vectors or the scores of a chunk's tokens."""


class HiddenReader(HiddenOutputs):
    """Log-probabilities of prompts, hidden states, chosen experts, pooled vectors and scores."""

    def __init__(self, model: Head, tables: DeviceTables, pooler: Pooler) -> None:
        self.target_logits, self.pooler = model.logits, pooler
        self._tables = tables

    def are_wanted(self, items: Items) -> bool:
        """Whether an item asks for more than what logits tell."""
        return bool(items.decodes.hidden or items.decodes.routed) or any(
            map(_wants_outputs, items.prefills)
        )

    def forget(self, rid: str) -> None:
        """The request has left, perhaps before its last chunk."""
        self.pooler.forget(rid)

    def add(self, step: StepHandle, item: Item, first: int, count: int, result: ItemResult) -> None:
        """Add to an item's result what it asks for, of its ``count`` tokens from ``first`` on."""
        if not _wants_outputs(item):
            return
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
        assert item.pooling is not None
        if item.pooling.per_token:
            rows = self.pooler.rows(hidden, item.pooling.is_raw).cpu()
            result.hidden_states = rows.numpy().tobytes()
            result.pooled = [] if item.start + item.count >= total else None
            is_finite = bool(rows.isfinite().all())
        else:
            result.pooled = self.pooler.add(item, hidden, total)
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
                append_logprobs(whole, found, row, token, item.logprobs)
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

    def num_head_runs(self, items: Items) -> int:
        """How often reading a step runs the head: for log-probabilities of prompts."""
        targets = (item.targets for item in items.prefills if item.targets is not None)
        return sum(-(-len(some) // PROMPT_ROWS) for some in targets)

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


def _wants_outputs(item: Item) -> bool:
    return item.targets is not None or _wants_rows(item) or bool(item.pooling)


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
