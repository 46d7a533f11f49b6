"""DraftTail: the end of a step in which the device's drafter reads what the step made known and
proposes tokens for the next.

Legend: T tokens, R rows (items that emit), K drafted tokens.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.executor import step_layout as layout
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.drafter import DeviceDrafter, DeviceProposals, StepTail
from radixlm.executor.results import StepHandle
from radixlm.sampling.table import SamplingTable
from radixlm.step.plan import Int32Array

log = logging.getLogger(__name__)


class DraftTail:
    """Calls a drafter after each step; its proposals join the step's results."""

    def __init__(
        self, drafter: DeviceDrafter, tables: DeviceTables, sampling: SamplingTable
    ) -> None:
        self.drafter, self._tables, self._sampling = drafter, tables, sampling

    @torch.inference_mode()
    def run(self, step: StepHandle) -> None:
        """Launch the drafter's work of a step that was sampled."""
        assert step.batch is not None
        tail, lens = self._tail(step), step.plan.draft_lens
        try:
            self.drafter.extend(step.batch, tail)
            found = None if lens is None else self.drafter.propose(tail, lens)
        except Exception:  # a drafter can only cost speed
            log.exception("a step goes on without drafts: the drafter failed")
            found = self._none(tail, lens)
        if found is None:
            return
        assert step.sampled_N is not None
        num_drafts = found.tokens_RK.shape[1]
        self._tables.known[1 : 1 + num_drafts, tail.slots_R] = found.tokens_RK.T.clamp(min=0)
        bits = found.survival_RK.float().contiguous().view(torch.int32).flatten()
        step.sampled_N = torch.cat((step.sampled_N, found.tokens_RK.int().flatten(), bits))

    def _none(self, tail: StepTail, lens_R: Int32Array | None) -> DeviceProposals | None:
        """Proposals of nothing, after which the drafter knows of no request any more."""
        for slot in range(self._tables.num_slots):
            self.drafter.release(slot)
        if lens_R is None:
            return None
        shape, where = (len(lens_R), int(lens_R.max())), tail.slots_R.device
        none_RK = torch.full(shape, -1, dtype=torch.int64, device=where)
        return DeviceProposals(none_RK, torch.zeros(shape, device=where))

    def _tail(self, step: StepHandle) -> StepTail:
        shape, buffer, count = step.shape, step.inputs.buffer, step.shape.num_results
        rows = shape.num_rows
        fields = (layout.TOKEN, layout.SAMPLE_SLOT, layout.POSITION)
        last_R, slots_R, positions_R = (buffer.field(one, rows).long() for one in fields)
        accepted_R = torch.zeros(count, dtype=torch.int64, device=slots_R.device)
        if shape.first_N1 is not None and step.counts_N is not None:
            first_R = self._to_device(shape.first_N1[:-1], slots_R)
            accepted_R = step.counts_N - 1
            last_R, slots_R, positions_R = (
                last_R[first_R + accepted_R],
                slots_R[first_R],
                positions_R[first_R + accepted_R],
            )
        emits = np.ones(len(step.items), np.bool_)
        emits[len(step.items.starts) :] = [item.emit for item in step.items.prefills]
        assert step.batch is not None
        return StepTail(
            items=step.items,
            sequences_R=self._to_device(np.flatnonzero(emits), slots_R),
            slots_R=slots_R,
            last_R=last_R,
            positions_R=positions_R,
            num_accepted_R=accepted_R,
            next_tokens_R=self._tables.next_token[slots_R],
            hidden_TD=step.batch.taps_TN,
            sampling=self._sampling,
        )

    @staticmethod
    def _to_device(numbers: NDArray[np.int64], like: Tensor) -> Tensor:
        return torch.from_numpy(numbers).to(like.device, non_blocking=True)
