"""ParallelDrafter: a draft that makes all its tokens in one step (P-EAGLE, PARD), as the device's
drafter. Behind the last known token stand masks, whose entries later tokens overwrite.

Legend: S sequences, R rows (requests), E known tokens, T these and masks, K drafted tokens, N
channels of the target's hidden states, D of the draft's, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixlm.base.record import replace
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.draft_entries import Int64Array, ranges
from radixlm.speculative.device.drafter import DeviceProposals, DraftColumns, StepTail
from radixlm.speculative.device.model_drafter import ModelDrafter
from radixlm.step.plan import Int32Array


class ParallelDrafter(ModelDrafter):
    """``net`` has a mask."""

    net: Any

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        columns = DraftColumns(lens_R, self._tables.device)
        slots = tail.slots_R.cpu().numpy()[columns.order_R]
        logits, at_R = self._logits(slots, columns.lens)
        states = [tail.sampling.states[slot] for slot in slots.tolist()]
        draw = Draw(states, self.net.target_ids_V, self._num_ids)
        for depth, logits_RV in enumerate(logits):
            columns.add(depth, *draw(logits_RV, at_R[: len(logits_RV)] + depth))
        return columns.proposals()

    def _logits(self, slots_R: Int64Array, lens_R: Int32Array) -> tuple[tuple[Tensor, ...], Tensor]:
        """The logits of each depth, of the first rows, whose drafts are as long, [R, V]; the
        position of the first draft of each row. The longest drafts come first."""
        taken = self._take(slots_R)
        assert taken is not None, "each row has a new token"
        known, hidden_EN = taken
        row_S = np.argsort(slots_R)  # sequences stand in the order of slots
        counts_S = known.counts_S + lens_R[row_S] - 1
        firsts_S = np.cumsum(counts_S) - counts_S
        at_E, _ = ranges(firsts_S, known.counts_S)
        index_T = np.full(int(counts_S.sum()), len(at_E))
        index_T[at_E] = np.arange(len(at_E))
        pick_T = self._put(index_T)
        assert self.net.mask is not None
        mask_1 = known.tokens_E.new_full((1,), self.net.mask)
        tokens_T = torch.cat((known.tokens_E, mask_1))[pick_T]
        hidden_TD = None
        if hidden_EN is not None:
            mask_1N: Tensor = self.net.mask_hidden_1N.to(hidden_EN.dtype)
            hidden_TD = self.net.combine(torch.cat((hidden_EN, mask_1N)))[pick_T]
        last_R = (firsts_S + known.counts_S - 1)[np.argsort(row_S)]
        nums = [int(np.count_nonzero(lens_R > depth)) for depth in range(int(lens_R[0]))]
        rows = np.concatenate([last_R[:num] + depth for depth, num in enumerate(nums)])
        fed = replace(known, counts_S=counts_S, tokens_E=tokens_T)
        output = self._forward(0, fed, hidden_TD, rows)
        return torch.split(output.logits_RV, nums), self._put(self._entries.done[slots_R])
