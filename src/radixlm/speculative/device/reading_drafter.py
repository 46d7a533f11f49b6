"""ReadingDrafter: a draft that reads the target's cache (``models/reading_draft.py``), as the
device's drafter. It keeps nothing from step to step.

Legend: S sequences, R rows that emit, N channels of the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radixlm.executor.device_tables import DeviceTables
from radixlm.speculative.device.stateless_drafter import StatelessDrafter
from radixlm.step.batch import ForwardBatch

if TYPE_CHECKING:
    from radixlm.models.reading_draft import ReadingDraft


class ReadingDrafter(StatelessDrafter):
    """``attn`` is the target's, whose KV groups have their pages in ``spaces``."""

    def __init__(
        self,
        net: ReadingDraft,
        attn: Any,
        tables: DeviceTables,
        spaces: Sequence[int],
        page_size: int,
        num_ids: int,
    ) -> None:
        super().__init__(net.needs, tables, num_ids)
        self.net, self._attn = net, attn
        self._spaces, self._page_size = spaces, page_size

    def _guess(
        self, depth: int, slots_R: Tensor, at_R: Tensor, tokens_R: Tensor, hidden_RN: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = self.net.draft_step(self._batch(slots_R, at_R, tokens_R), hidden_RN)
        assert output.hidden_RD is not None
        return output.logits_RV, output.hidden_RD

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
