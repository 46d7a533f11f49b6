"""What the runner asks of a drafter that runs on the device: a draft model, or a head that reads
hidden states of the target model (EAGLE, MTP). Both calls come in the tail of a step, after its
tokens were sampled and its drafts accepted or refused; what they launch stays on the device.

The drafter's own KV pool has the pages of group 0: one page table, two pools.

Legend: S sequences, T tokens, R rows (items that emit), K drafted tokens, N hidden states, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor import step_layout as layout
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.results import StepHandle
from radixlm.models.taps import HiddenNeeds
from radixlm.sampling.table import SamplingTable
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Int32Array, Items, PageCopy

log = logging.getLogger(__name__)

MIN_ROUNDS = 256  # verifications after which a draft model is judged


class StepTail:
    """A step after sampling, on the device. One row for each item that emits, in their order;
    ``sequences_R`` (int64) is its sequence in the batch, or the path of drafts that gave its
    tokens. Each tensor is made when it is asked for.

    slots_R          int64
    last_R           int64: index into T of the last place whose token is known: of a decode row
                     with drafts, the place of the last accepted one
    positions_R      int64: position in the sequence of ``next_tokens_R`` (keys its draw)
    num_accepted_R   int64: accepted drafts, 0 for the last chunk of a prefill
    next_tokens_R    int64: the sampled token that is not computed yet
    hidden_TD        [T, N * D] as ``HiddenNeeds`` asks, else None
    sampling         parameters by slot: temperature and seed, so that the drafter may draw with
                     the target's noise (by the target's token ids)
    """

    def __init__(self, step: StepHandle, tables: DeviceTables, sampling: SamplingTable) -> None:
        assert step.batch is not None
        self._step, self._tables, self.sampling = step, tables, sampling
        self.items, self.hidden_TD = step.items, step.batch.taps_TN

    @cached_property
    def sequences_R(self) -> Tensor:
        emits = np.ones(len(self.items), np.bool_)
        emits[len(self.items.starts) :] = [item.emit for item in self.items.others]
        sequences_A, accepted = self._on_device(np.flatnonzero(emits)), self._step.accepted
        if accepted is None or accepted.chosen_N is None:
            return sequences_A
        return sequences_A[accepted.chosen_N]

    @cached_property
    def num_accepted_R(self) -> Tensor:
        accepted, num = self._step.accepted, self._step.shape.num_results
        if accepted is None:
            return torch.zeros(num, dtype=torch.int64, device=self._tables.device)
        return accepted.counts_N - 1

    @cached_property
    def slots_R(self) -> Tensor:
        return self._rows(layout.SAMPLE_SLOT, is_last=False)

    @cached_property
    def last_R(self) -> Tensor:
        return self._rows(layout.TOKEN)

    @cached_property
    def positions_R(self) -> Tensor:
        return self._rows(layout.POSITION)

    @cached_property
    def next_tokens_R(self) -> Tensor:
        sampled_N = self._step.sampled_N
        if self._step.accepted is None and sampled_N is not None:
            return sampled_N[: self._step.shape.num_results].long()
        return self._tables.next_token[self.slots_R]

    def _rows(self, field: int, is_last: bool = True) -> Tensor:
        """A field of each sequence's last accepted row of logits, or of its first."""
        step = self._step
        values = step.inputs.buffer.field(field, step.shape.num_rows).long()
        if step.accepted is None:
            return values
        return values[step.first_rows(values.device) + self.num_accepted_R * is_last]

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._tables.device, non_blocking=True)


class DeviceProposals(Record, eq=False):
    """Drafted tokens for the next step: int64 [R, K] and their survival, float32 [R, K]; of row r
    the first ``lens_R[r]`` count. Of trees, those that are not negative count, and ``parents_RK``
    (int64) tells the draft before each, as in ``Proposals``."""

    tokens_RK: Tensor
    survival_RK: Tensor
    parents_RK: Tensor | None = None


class DraftColumns:
    """Collects the proposals of rows that are drafted together, one depth after another. Rows with
    the longest drafts come first, those without any are left out: ``order_R`` are their numbers,
    ``index_R`` the same on the device, ``lens`` the lengths of their drafts."""

    def __init__(self, lens_R: Int32Array, where: torch.device) -> None:
        shape = len(lens_R), int(lens_R.max())
        self.order_R = np.argsort(-lens_R, kind="stable")[: np.count_nonzero(lens_R)]
        self.lens: Int32Array = lens_R[self.order_R]
        self.index_R = torch.from_numpy(self.order_R).to(where)
        self.tokens_RK = torch.zeros(shape, dtype=torch.int64, device=where)
        self._survival_RK = torch.zeros(shape, device=where)
        self._survival_R = torch.ones(len(self.lens), device=where)

    def num_rows(self, depth: int) -> int:
        """The first rows, whose drafts are longer than ``depth``."""
        return int(np.count_nonzero(self.lens > depth))

    def add(self, depth: int, tokens_R: Tensor, chance_R: Tensor) -> None:
        """The tokens of the first rows at ``depth``, and the chance of each behind those before."""
        index_R, self._survival_R = self.index_R[: len(tokens_R)], self._survival_R[: len(tokens_R)]
        self._survival_R = self._survival_R * chance_R
        self.tokens_RK[index_R, depth] = tokens_R
        self._survival_RK[index_R, depth] = self._survival_R

    def proposals(self) -> DeviceProposals:
        """Of all rows, in their order."""
        return DeviceProposals(self.tokens_RK, self._survival_RK)


class FitWatch:
    """Warns once of a draft model that does not fit its target."""

    def __init__(self) -> None:
        self._num_rounds = self._num_accepted = 0

    def count(self, tail: StepTail) -> None:
        """Note the drafts that a step verified."""
        drafts = tail.items.drafts
        if drafts is None or self._num_rounds > MIN_ROUNDS:
            return
        self._num_rounds += int(np.count_nonzero(drafts.lens))
        self._num_accepted += int(tail.num_accepted_R.sum())
        if self._num_rounds > MIN_ROUNDS > 10 * self._num_accepted:
            log.warning(
                "the draft model does not fit: %d drafted tokens were accepted in %d steps; one "
                "that was made for this model is right more often",
                self._num_accepted,
                self._num_rounds,
            )


class DeviceDrafter(Protocol):
    """A drafter on the device. What it proposes costs time only where it is wrong."""

    hidden: HiddenNeeds | None

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside the pools of its KV."""

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        """Write its KV for the tokens that the step made known. Places behind ``last_R`` hold
        refused drafts: what is written there is overwritten later."""

    def skip(self, items: Items) -> None:
        """A step whose tokens it does not see; each step is extended by or skipped."""

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft ``lens_R[r]`` tokens behind ``next_tokens_R[r]``; K is the largest of them. The
        pages of these places are allocated."""

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
