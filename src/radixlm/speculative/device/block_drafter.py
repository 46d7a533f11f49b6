"""BlockDrafter: a draft of a block of tokens in one step (``models/block_draft.py``), as the
device's drafter.

The cache has an entry of each token whose hidden states are known: of all but the last known one.
That one and masks behind it are a block, which stands in pages of its own: other tokens will stand
at its places.

Legend: E entries, R rows (requests), B tokens of a block, T = R * B, K drafted tokens, D width, V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from radixlm.speculative.device.branch_pages import BranchPages
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.draft_entries import Int64Array
from radixlm.speculative.device.drafter import DeviceProposals, StepTail
from radixlm.speculative.device.model_drafter import ModelDrafter, Places
from radixlm.speculative.trees import MAX_ROWS, TreeShape
from radixlm.step.plan import Int32Array

if TYPE_CHECKING:
    from radixlm.models.block_draft import BlockDraft
    from radixlm.models.drafts import DraftOutput


class BlockDrafter(ModelDrafter):
    """``shape``: of one branch with the entries of a block. Drafts that a block has no place for
    have the chance 0."""

    net: BlockDraft
    lag = 1

    def __init__(
        self,
        net: BlockDraft,
        attn: Any,
        tables: Any,
        page_size: int,
        num_ids: int,
        shape: TreeShape,
        **more: Any,
    ) -> None:
        super().__init__(net, attn, tables, page_size, num_ids, **more)
        self._branches = BranchPages(shape, page_size, self._entries, self.pools)

    def _write(self, slots_R: Int64Array | None) -> DraftOutput | None:
        """Store the entries that wait, of ``slots_R`` or of all."""
        entries = self._entries.take(slots_R)
        if (blank_B := self._entries.blanks()) is not None:
            self._blank(blank_B)
        if entries is None:
            return None
        assert entries.hidden_EN is not None
        at_E, row = entries.at_E - 1, np.arange(len(entries.at_E) + 1)
        store_E = self._entries.places(entries.slots_E, at_E)
        places = Places(at_E, store_E, at_E + 1, row, row[:0])
        table_E0 = self._put(row[:-1, None], torch.int32)[:, :0]  # nothing is read
        batch = self._batch(0, places, table_E0, entries.slots_E)
        self.net.store_entries(batch, entries.hidden_EN)
        return None

    def propose(self, tail: StepTail, lens_R: Int32Array) -> DeviceProposals:
        """Draft greedily, or with the target's noise where the temperature is high."""
        most, where = int(lens_R.max()), self._tables.device
        tokens_RK = torch.zeros(len(lens_R), most, dtype=torch.int64, device=where)
        survival_RK = torch.zeros(len(lens_R), most, device=where)
        num = min(most, self.net.block.num_drafts)
        rows_R, slots_R = np.flatnonzero(lens_R), tail.slots_R.cpu().numpy()
        self._write(slots_R[rows_R])
        for begin in range(0, len(rows_R), MAX_ROWS):
            part_R = rows_R[begin : begin + MAX_ROWS]
            index_R, slots = self._put(part_R), slots_R[part_R]
            states = [tail.sampling.states[slot] for slot in slots.tolist()]
            draw = Draw(states, self.net.target_ids_V, self._num_ids)
            drafted_RK, chance_RK = self._drafts(slots, tail.next_tokens_R[index_R], num, draw)
            tokens_RK[index_R, :num] = drafted_RK
            survival_RK[index_R, :num] = chance_RK.cumprod(1)
        return DeviceProposals(tokens_RK, survival_RK)

    def _drafts(
        self, slots_R: Int64Array, last_R: Tensor, count: int, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        """``count`` tokens behind the last known ones and the chance of each: [R, K]."""
        hidden_RKD, net = self._block_step(slots_R, self._fed(last_R), count), self.net
        logits_RKV = net.block_logits(hidden_RKD.flatten(0, 1)).view(len(slots_R), count, -1)
        at_R = self._put(self._entries.done[slots_R])
        tokens, chances, before_R, state = [], [], self._fed(last_R), None
        for depth in range(count):
            logits_RV = logits_RKV[:, depth]
            logits_RV, state = net.behind(before_R, logits_RV, hidden_RKD[:, depth], state)
            before_R, chance_R = draw(logits_RV, at_R + depth)
            tokens.append(before_R)
            chances.append(chance_R)
        return torch.stack(tokens, 1), torch.stack(chances, 1)

    def _block_step(self, slots_R: Int64Array, last_R: Tensor, count: int) -> Tensor:
        """What the head reads at the places that draft ``count`` tokens: [R, K, D]."""
        block, num = self.net.block, len(slots_R)
        width, first = block.size, block.size - block.num_drafts  # place of the first draft
        starts_R = self._entries.done[slots_R] - 1
        ends_R, row_T = starts_R + width, np.repeat(np.arange(num), width)
        at_T = (starts_R[:, None] + np.arange(width)).flatten()
        table_RP = self._branches.tables(
            slots_R, self._tables_of(slots_R, ends_R), starts_R, 1, width
        )
        self._branches.fork(slots_R, starts_R, np.arange(num), 1, 1)
        store_T = self._branches.places(row_T, at_T, starts_R[row_T])
        firsts = np.arange(num + 1) * width
        rows_R = (firsts[:-1, None] + first + np.arange(count)).flatten()
        places = Places(at_T, store_T, ends_R, firsts, rows_R)
        batch = self._batch(0, places, table_RP, slots_R)
        batch.bidirectional_spans = tuple((int(at), width) for at in firsts[:-1])
        tokens_RB = last_R.new_full((num, width), block.mask)
        tokens_RB[:, 0] = last_R
        batch.token_ids_T = tokens_RB.flatten()
        return self.net.block_step(batch).view(num, count, -1)
