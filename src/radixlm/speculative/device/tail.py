"""DraftTail: the end of a step in which the device's drafter reads what the step made known and
proposes tokens for the next.

Legend: T tokens, R rows (items that emit), K drafted tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.results import StepHandle
from radixlm.sampling.table import SamplingTable
from radixlm.speculative.device.drafter import DeviceDrafter, DeviceProposals, StepTail
from radixlm.step.plan import Int32Array, Items, PageCopy

log = logging.getLogger(__name__)


class DraftTail:
    """Calls a drafter after each step; its proposals join the step's results."""

    def __init__(
        self,
        drafter: DeviceDrafter,
        tables: DeviceTables,
        sampling: SamplingTable,
        page_size: int,
        has_states: bool = False,
    ) -> None:
        """``has_states``: a row whose draft was refused is computed again, and drafts then."""
        self.drafter, self._tables, self._sampling = drafter, tables, sampling
        self._page_size, self._has_states = page_size, has_states

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages inside the pools of the drafter's KV."""
        self.drafter.copy_pages(copies)

    def release(self, slot: int) -> None:
        """The request of this slot is over."""
        self.drafter.release(slot)

    def run(self, step: StepHandle) -> None:
        """Launch the drafter's work of a step that was sampled."""
        lens = step.plan.draft_lens
        if lens is None:
            items, first_A1 = step.items, step.shape.first_A1
            if step.more_N is not None and first_A1 is not None:  # the last token of each row
                items = Items(items.decodes, items.starts + np.diff(first_A1) - 1)
            self.drafter.skip(items)
        else:
            self._draft(step, lens if any(step.proposed_shape) else None)

    @torch.inference_mode()
    def _draft(self, step: StepHandle, lens: Int32Array | None) -> None:
        assert step.batch is not None
        tail = StepTail(step, self._tables, self._sampling)
        if step.items.paths:
            self._adopt(step, tail)
        found, shape = None, step.proposed_shape[1:]
        try:
            self.drafter.extend(step.batch, tail)
            if lens is not None:
                found = self._propose(tail, lens, shape)
        except Exception:  # a drafter can only cost speed
            log.exception("a step goes on without drafts: the drafter failed")
            self._forget_all()
            found = None if lens is None else _no_proposals(shape, tail.slots_R.device)
        if found is None:
            return
        assert step.sampled_N is not None
        if not step.tree_size:
            self._tables.known[1 : 1 + shape[1], tail.slots_R] = found.tokens_RK.T.clamp(min=0)
        bits = found.survival_RK.float().contiguous().view(torch.int32).flatten()
        parts = [step.sampled_N, found.tokens_RK.int().flatten(), bits]
        if step.tree_size:
            parents_RK = found.parents_RK
            parts.append((found.tokens_RK if parents_RK is None else parents_RK).int().flatten())
        step.sampled_N = torch.cat(parts)

    def _adopt(self, step: StepHandle, tail: StepTail) -> None:
        """Have the drafter see the pages of the paths that were right, where it goes on."""
        assert step.accepted is not None and step.accepted.chosen_N is not None
        num, size = step.shape.num_results, self._page_size
        chosen_N, accepted_N = step.accepted.chosen_N.tolist(), tail.num_accepted_R.tolist()
        for chosen, accepted in zip(chosen_N, accepted_N, strict=True):
            if chosen >= num:
                path = step.items.paths[chosen - num]
                first, last = path.start // size, (path.start + accepted) // size
                _adopt(self._tables, path.slot, path.page_row, slice(first, last + 1))

    def _propose(
        self, tail: StepTail, lens_R: Int32Array, shape: tuple[int, int]
    ) -> DeviceProposals:
        drafts = tail.items.drafts
        if self._has_states and drafts is not None:
            accepted_R = tail.num_accepted_R[: len(drafts.lens)].cpu().numpy()
            lens_R = lens_R.copy()
            lens_R[: len(drafts.lens)] *= accepted_R == drafts.lens
        if not lens_R.any():
            return _no_proposals(shape, tail.slots_R.device)
        found = self.drafter.propose(tail, lens_R)
        missing = (0, shape[1] - found.tokens_RK.shape[1])
        if not missing[1]:
            return found
        pad = torch.nn.functional.pad
        return DeviceProposals(
            pad(found.tokens_RK, missing, value=-1), pad(found.survival_RK, missing)
        )

    def _forget_all(self) -> None:
        """The drafter knows of no request any more."""
        for slot in range(self._tables.num_slots):
            self.drafter.release(slot)


def _no_proposals(shape: tuple[int, int], where: torch.device) -> DeviceProposals:
    none_RK = torch.full(shape, -1, dtype=torch.int64, device=where)
    return DeviceProposals(none_RK, torch.zeros(shape, device=where))


def _adopt(tables: DeviceTables, slot: int, page_row: int, columns: slice) -> None:
    """These columns of a slot are those of a path of its drafts from now on, as the scheduler will
    say too."""
    tables.pages[:, slot, columns] = tables.pages[:, page_row, columns]
    if not tables.is_shared:
        own = tables.device_pages
        own[:, slot, columns] = own[:, page_row, columns]
