"""MedusaDrafter: Medusa heads (``models/medusa.py``) as the device's drafter.

Legend: R rows that emit, K drafted tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.draft_draws import Draw
from radixlm.executor.drafter import DeviceProposals, StatelessDrafter, StepTail
from radixlm.step.plan import Int32Array

if TYPE_CHECKING:
    from radixlm.models.medusa import MedusaHead


class MedusaDrafter(StatelessDrafter):
    """``nets``: a head for each draft; further drafts have the chance 0. ``num_ids``: target
    tokens from this id on are never proposed."""

    def __init__(self, nets: Sequence[MedusaHead], tables: DeviceTables, num_ids: int) -> None:
        super().__init__()
        self._nets, self._tables, self._num_ids = nets, tables, num_ids
        self.hidden = nets[0].needs

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        most, where = int(lens_R.max()), self._tables.device
        order_R = np.argsort(-lens_R, kind="stable")[: np.count_nonzero(lens_R)]
        lens, index_R = lens_R[order_R], torch.from_numpy(order_R).to(where)
        slots_R, at_R = tail.slots_R[index_R], tail.positions_R[index_R]
        assert tail.hidden_TD is not None, "the target leaves no hidden states"
        hidden_RD = tail.hidden_TD[tail.last_R[index_R]]
        tokens_RK = torch.zeros(len(lens_R), most, dtype=torch.int64, device=where)
        survival_RK = torch.zeros(len(lens_R), most, device=where)
        states = [tail.sampling.states[slot] for slot in slots_R.tolist()]
        draw, survival_R = Draw(states, None, self._num_ids), torch.ones(len(lens), device=where)
        for depth, net in enumerate(self._nets[:most]):
            num = int(np.count_nonzero(lens > depth))
            tokens_R, chance_R = draw(net.guess(hidden_RD[:num]), at_R[:num] + depth + 1)
            survival_R = survival_R[:num] * chance_R
            tokens_RK[index_R[:num], depth] = tokens_R
            survival_RK[index_R[:num], depth] = survival_R
        return DeviceProposals(tokens_RK, survival_RK)
