"""BranchPages: pages at the end of a draft's pools for entries that only one proposal reads.

Legend: R rows (requests), k branches of each, B = R * k branches of all, C pages of a branch, P
columns of a page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixlm.pools.pool import KvPool
from radixlm.speculative.device.draft_entries import DraftEntries, Int64Array
from radixlm.speculative.trees import MAX_ROWS, TreeShape


class BranchPages:
    """The first entries of a row's branches stand at position ``ends_R``, behind the request's own
    entries."""

    def __init__(
        self, shape: TreeShape, page_size: int, entries: DraftEntries, pools: Sequence[KvPool]
    ) -> None:
        self._size, self._entries, self._pools = page_size, entries, pools
        num, count = shape.branches, shape.pages_of_branch(page_size)
        pages = shape.first_page + np.arange(MAX_ROWS * num * count)
        self._pages_BC: Int64Array = pages.reshape(MAX_ROWS * num, count)

    def tables(
        self, slots_R: Int64Array, table_RP: Tensor, ends_R: Int64Array, k: int, count: int
    ) -> Tensor:
        """The page tables of all branches: the rows' pages (``table_RP``), then their own, for
        ``count`` entries."""
        table_BP, size = table_RP.repeat_interleave(k, 0), self._size
        first_R = (ends_R - self._entries.base[slots_R]) // size
        num_R = (ends_R + count - 1) // size - ends_R // size + 1
        for row, (first, num) in enumerate(zip(first_R.tolist(), num_R.tolist(), strict=True)):
            own = torch.from_numpy(self._pages_BC[row * k : (row + 1) * k, :num])
            table_BP[row * k : (row + 1) * k, first : first + num] = own.to(table_BP)
        return table_BP

    def places(self, branch_E: Int64Array, at_E: Int64Array, ends_E: Int64Array) -> Int64Array:
        """Where the cache keeps entries at positions ``at_E`` of these branches, whose first ones
        stand at ``ends_E``: page * page_size + offset."""
        column_E = at_E // self._size - ends_E // self._size
        places: Int64Array = self._pages_BC[branch_E, column_E] * self._size + at_E % self._size
        return places

    def fork(
        self, slots_R: Int64Array, ends_R: Int64Array, origin_B: Int64Array, k: int, depth: int
    ) -> None:
        """Give each branch what stands before its next entry: at first the entries in its row's
        last page, then those of the branch that it goes on from (``origin_B``)."""
        columns_R = ends_R // self._size
        if depth == 1:
            has_some_B = np.repeat(ends_R % self._size > 0, k)
            sources = np.repeat(self._entries.pages(slots_R, columns_R), k)[has_some_B]
            targets = self._pages_BC[: len(has_some_B), 0][has_some_B]
        else:
            used_R = (ends_R + depth - 2) // self._size - columns_R + 1
            is_used = np.arange(self._pages_BC.shape[1]) < np.repeat(used_R, k)[:, None]
            is_used &= (origin_B != np.arange(len(origin_B)))[:, None]
            sources = self._pages_BC[origin_B][is_used]
            targets = self._pages_BC[: len(origin_B)][is_used]
        for pool in self._pools if len(sources) else ():
            pool.copy_pages(sources.tolist(), targets.tolist())
