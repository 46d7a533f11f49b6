"""ReadingDrafter: a draft that reads the target's cache (``models/reading_draft.py``), as the
device's drafter. It keeps nothing from step to step.

Legend: S sequences, R rows that emit, K drafted tokens, N channels of the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.drafter import (
    DeviceProposals,
    DraftColumns,
    StatelessDrafter,
    StepTail,
)
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Int32Array

if TYPE_CHECKING:
    from radixlm.models.reading_draft import ReadingDraft


class ReadingDrafter(StatelessDrafter):
    """``attn`` is the target's, whose KV groups have their pages in ``spaces``. ``num_ids``: target
    tokens from this id on are never proposed."""

    def __init__(
        self,
        net: ReadingDraft,
        attn: Any,
        tables: DeviceTables,
        spaces: Sequence[int],
        page_size: int,
        num_ids: int,
    ) -> None:
        super().__init__()
        self.net, self.hidden, self._attn = net, net.needs, attn
        self._tables, self._spaces, self._page_size = tables, spaces, page_size
        self._num_ids = num_ids

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        columns = DraftColumns(lens_R, self._tables.device)
        index_R = columns.index_R
        slots_R, at_R = tail.slots_R[index_R], tail.positions_R[index_R]
        assert tail.hidden_TD is not None, "the target leaves no hidden states"
        tokens_R, hidden_RN = tail.next_tokens_R[index_R], tail.hidden_TD[tail.last_R[index_R]]
        states = [tail.sampling.states[slot] for slot in slots_R.tolist()]
        draw = Draw(states, None, self._num_ids)
        for depth in range(int(lens_R.max())):
            num = columns.num_rows(depth)
            batch = self._batch(slots_R[:num], at_R[:num], tokens_R[:num])
            output = self.net.draft_step(batch, hidden_RN[:num])
            tokens_R, chance_R = draw(output.logits_RV, at_R[:num] + depth + 1)
            columns.add(depth, tokens_R, chance_R)
            assert output.hidden_RD is not None
            hidden_RN = output.hidden_RD
        return columns.proposals()

    def _batch(self, slots_R: Tensor, at_R: Tensor, tokens_R: Tensor) -> ForwardBatch:
        """One token of each row at the place behind the ``at_R`` tokens that it reads."""
        max_len = int(at_R.max()) + 1
        width = min(-(-max_len // self._page_size), self._tables.max_pages)
        pages = [table[:, :width].index_select(0, slots_R) for table in self._tables.device_pages]
        rows_R1 = torch.arange(len(at_R) + 1, device=at_R.device)
        return ForwardBatch(
            token_ids_T=tokens_R.clamp(0, self._num_ids - 1),
            positions_T=at_R,
            rope_len_T=at_R + 1,
            query_start_S1=rows_R1.int(),
            kv_len_S=at_R.int(),
            page_table_GSP=tuple(pages[space] for space in self._spaces),
            store_GT=(torch.zeros_like(at_R),) * len(self._spaces),
            logits_rows_R=rows_R1[:-1],
            attn=self._attn,
            max_query_len=1,
            max_kv_len=max_len,
            is_decode=True,
        )
