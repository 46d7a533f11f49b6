"""What the runner asks of a drafter that runs on the device: a draft model, or a head that reads
hidden states of the target model (EAGLE, MTP). Both calls come in the tail of a step, after its
tokens were sampled and its drafts accepted or refused; what they launch stays on the device.

The drafter's own KV pool has the pages of group 0: one page table, two pools.

Legend: S sequences, T tokens, R rows (items that emit), K drafted tokens, N hidden states, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from radixlm.base.record import Record
from radixlm.pools.pool import KvPool
from radixlm.sampling.table import SamplingTable
from radixlm.step.batch import ForwardBatch, HiddenNeeds
from radixlm.step.plan import Int32Array, Items


class StepTail(Record, eq=False):
    """A step after sampling, on the device. One row for each item that emits, in their order;
    ``sequences_R`` (int64) is its sequence in the batch.

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

    items: Items
    sequences_R: Tensor
    slots_R: Tensor
    last_R: Tensor
    positions_R: Tensor
    num_accepted_R: Tensor
    next_tokens_R: Tensor
    hidden_TD: Tensor | None
    sampling: SamplingTable


class DeviceProposals(Record, eq=False):
    """Drafted tokens for the next step: int64 [R, K] and their survival, float32 [R, K]; of row r
    the first ``lens_R[r]`` count."""

    tokens_RK: Tensor
    survival_RK: Tensor


class DeviceDrafter(Protocol):
    """A drafter on the device. What it proposes costs time only where it is wrong."""

    hidden: HiddenNeeds | None
    pools: Sequence[KvPool]  # of its KV, with the pages of group 0

    def extend(self, batch: ForwardBatch, tail: StepTail) -> None:
        """Write its KV for the tokens that the step made known; called after every step. Places
        behind ``last_R`` hold refused drafts: what is written there is overwritten later."""
        ...

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft ``lens_R[r]`` tokens behind ``next_tokens_R[r]``; K is the largest of them. The
        pages of these places are allocated."""
        ...

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
        ...
