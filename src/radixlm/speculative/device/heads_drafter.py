"""HeadsDrafter: heads that guess one token further each (``models/draft_heads.py``) as the device's
drafter.

Legend: R rows that emit, K drafted tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixlm.executor.device_tables import DeviceTables
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.drafter import (
    DeviceProposals,
    DraftColumns,
    StatelessDrafter,
    StepTail,
)
from radixlm.step.plan import Int32Array

if TYPE_CHECKING:
    from radixlm.models.draft_heads import DraftHead


class HeadsDrafter(StatelessDrafter):
    """``nets``: a head for each draft; further drafts have the chance 0. ``num_ids``: target
    tokens from this id on are never proposed."""

    def __init__(self, nets: Sequence[DraftHead], tables: DeviceTables, num_ids: int) -> None:
        super().__init__()
        self._nets, self._tables, self._num_ids = nets, tables, num_ids
        self.hidden = nets[0].needs

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        columns = DraftColumns(lens_R, self._tables.device)
        index_R = columns.index_R
        slots_R, at_R = tail.slots_R[index_R], tail.positions_R[index_R]
        assert tail.hidden_TD is not None, "the target leaves no hidden states"
        tokens_R, hidden_RD = tail.next_tokens_R[index_R], tail.hidden_TD[tail.last_R[index_R]]
        states = [tail.sampling.states[slot] for slot in slots_R.tolist()]
        draw = Draw(states, self._nets[0].target_ids_V, self._num_ids)
        for depth, net in enumerate(self._nets[: int(lens_R.max())]):
            num = columns.num_rows(depth)
            logits_RV, hidden_RD = net.guess(hidden_RD[:num], tokens_R[:num])
            tokens_R, chance_R = draw(logits_RV, at_R[:num] + depth + 1)
            columns.add(depth, tokens_R, chance_R)
        return columns.proposals()
