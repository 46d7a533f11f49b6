"""DraftTail: the end of a step in which the device's drafter reads what the step made known and
proposes tokens for the next.

Legend: T tokens, R rows (items that emit), K drafted tokens.
"""

from __future__ import annotations

import logging

import torch

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.drafter import DeviceDrafter, DeviceProposals, StepTail
from radixlm.executor.results import StepHandle
from radixlm.sampling.table import SamplingTable
from radixlm.step.plan import Int32Array

log = logging.getLogger(__name__)


class DraftTail:
    """Calls a drafter after each step; its proposals join the step's results."""

    def __init__(
        self,
        drafter: DeviceDrafter,
        tables: DeviceTables,
        sampling: SamplingTable,
        has_states: bool = False,
    ) -> None:
        """``has_states``: a row whose draft was refused is computed again, and drafts then."""
        self.drafter, self._tables, self._sampling = drafter, tables, sampling
        self._has_states = has_states

    def run(self, step: StepHandle) -> None:
        """Launch the drafter's work of a step that was sampled."""
        lens = step.plan.draft_lens
        if lens is None:
            self.drafter.skip(step.items)
        else:
            self._draft(step, lens if step.num_proposed else None)

    @torch.inference_mode()
    def _draft(self, step: StepHandle, lens: Int32Array | None) -> None:
        assert step.batch is not None
        tail = StepTail(step, self._tables, self._sampling)
        try:
            self.drafter.extend(step.batch, tail)
            found = None if lens is None else self._propose(tail, lens)
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

    def _propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        drafts, width = tail.items.drafts, int(lens_R.max())
        if self._has_states and drafts is not None:
            accepted_R = tail.num_accepted_R[: len(drafts.lens)].cpu().numpy()
            lens_R = lens_R.copy()
            lens_R[: len(drafts.lens)] *= accepted_R == drafts.lens
        shape, where = (len(lens_R), width), tail.slots_R.device
        if not lens_R.any():
            return _no_proposals(shape, where)
        found = self.drafter.propose(tail, lens_R)
        missing = (0, width - found.tokens_RK.shape[1])
        if not missing[1]:
            return found
        pad = torch.nn.functional.pad
        return DeviceProposals(
            pad(found.tokens_RK, missing, value=-1), pad(found.survival_RK, missing)
        )

    def _none(self, tail: StepTail, lens_R: Int32Array | None) -> DeviceProposals | None:
        """Proposals of nothing, after which the drafter knows of no request any more."""
        for slot in range(self._tables.num_slots):
            self.drafter.release(slot)
        if lens_R is None:
            return None
        return _no_proposals((len(lens_R), int(lens_R.max())), tail.slots_R.device)


def _no_proposals(shape: tuple[int, int], where: torch.device) -> DeviceProposals:
    none_RK = torch.full(shape, -1, dtype=torch.int64, device=where)
    return DeviceProposals(none_RK, torch.zeros(shape, device=where))
