"""HeadsDrafter: heads that guess one token further each (``models/draft_heads.py``) as the device's
drafter.

Legend: R rows that emit, V vocabulary, N channels of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.speculative.device.stateless_drafter import StatelessDrafter

if TYPE_CHECKING:
    from radixlm.models.draft_heads import DraftHead


class HeadsDrafter(StatelessDrafter):
    """``nets``: a head for each draft."""

    def __init__(self, nets: Sequence[DraftHead], tables: DeviceTables, num_ids: int) -> None:
        super().__init__(nets[0].needs, tables, num_ids, len(nets), nets[0].target_ids_V)
        self._nets = nets

    def _guess(
        self, depth: int, slots_R: Tensor, at_R: Tensor, tokens_R: Tensor, hidden_RN: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._nets[depth].guess(hidden_RN, tokens_R)
