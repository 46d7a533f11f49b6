"""DraftTrees: trees of drafts from a draft model, as EAGLE-2 grows them (arXiv:2406.16858).

Behind the last token the k best tokens are drafted, then behind each of k drafts of a depth its k
best; of these k * k those of the highest product of chances are gone on with. Of all drafts, those
of the highest products stay: they are a tree, as no draft has a higher product than the one before
it. Each of the k branches of a request has pages of its own for its drafts' entries.

Legend: R rows (requests), k branches, B = R * k branches of all, N drafts of a tree, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.pools.pool import KvPool
from radixlm.speculative.device.branch_pages import BranchPages
from radixlm.speculative.device.draft_draws import Draw
from radixlm.speculative.device.draft_entries import DraftEntries, Int64Array
from radixlm.speculative.trees import MAX_ROWS, TreeShape


class Tree:
    """Of each row the drafts made so far, in an order in which no draft comes before the one that
    it follows."""

    def __init__(self, num_rows: int, num_drafts: int) -> None:
        shape = num_rows, num_drafts
        self.tokens: Int64Array = np.zeros(shape, np.int64)
        self.parents: Int64Array = np.full(shape, -1)
        self.scores: NDArray[np.float64] = np.full(shape, -1.0)  # -1: not made
        self.num = 0

    def add(
        self, tokens_Rn: Int64Array, scores_Rn: NDArray[Any], parents_Rn: Int64Array | int
    ) -> None:
        """Drafts of the first rows."""
        num, count = tokens_Rn.shape
        part = slice(num), slice(self.num, self.num + count)
        self.tokens[part], self.scores[part] = tokens_Rn, scores_Rn
        self.parents[part] = parents_Rn
        self.num += count

    def best(self, size: int) -> tuple[NDArray[Any], ...]:
        """Tokens (-1 behind the last), products and parents of the best ``size`` of each row."""
        kept_RN = np.sort(np.argsort(-self.scores, axis=1, kind="stable")[:, :size], axis=1)
        place = np.full(self.scores.shape, -1)
        np.put_along_axis(place, kept_RN, np.arange(kept_RN.shape[1])[None], 1)
        parts = (self.tokens, self.scores, self.parents)
        tokens, scores, parents = (np.take_along_axis(one, kept_RN, 1) for one in parts)
        parents = np.where(parents < 0, -1, np.take_along_axis(place, np.maximum(parents, 0), 1))
        is_made = scores >= 0
        return np.where(is_made, tokens, -1), np.where(is_made, scores, 0.0), parents


# places, where they are stored, pages, slots, tokens and hidden states of a draft step
Step = Callable[[Int64Array, Int64Array, Tensor, Int64Array, Tensor, Tensor | None], Any]


class DraftTrees:
    """``step``: a step of the draft model, one token a row; its output is a ``DraftOutput``."""

    def __init__(
        self,
        shape: TreeShape,
        page_size: int,
        entries: DraftEntries,
        pools: Sequence[KvPool],
        step: Step,
    ) -> None:
        self.shape, self._entries, self._step = shape, entries, step
        self._pages = BranchPages(shape, page_size, entries, pools)

    def grow(
        self, slots_R: Int64Array, lens_R: NDArray[np.int32], table_RP: Tensor, out: Any, draw: Draw
    ) -> list[tuple[NDArray[Any], ...]]:
        """The trees of these rows, the deepest first, whose last tokens ``out`` follows: parts of
        the rows, as ``Tree.best`` tells them."""
        found = []
        for begin in range(0, len(slots_R), MAX_ROWS):
            part = slice(begin, begin + MAX_ROWS)
            hidden_RD = None if out.hidden_RD is None else out.hidden_RD[part]
            rows = np.arange(begin, min(begin + MAX_ROWS, len(slots_R)))
            given = slots_R[part], lens_R[part], table_RP[part], out.logits_RV[part], hidden_RD
            found.append(self._grow(*given, rows, draw))
        return found

    def _grow(
        self,
        slots_R: Int64Array,
        lens_R: NDArray[np.int32],
        table_RP: Tensor,
        logits_RV: Tensor,
        hidden_BD: Tensor | None,
        rows_R: Int64Array,
        draw: Draw,
    ) -> tuple[NDArray[Any], ...]:
        ends_R = self._entries.done[slots_R]
        most, where = int(lens_R.max()), logits_RV.device
        at_R = torch.from_numpy(ends_R).to(where)
        tokens_Rk, chance_Rk = draw.branches(logits_RV, at_R, rows_R, self.shape.branches)
        k, num = tokens_Rk.shape[1], len(slots_R)
        tree = Tree(num, k + (most - 1) * k * k)
        tree.add(tokens_Rk, chance_Rk, -1)
        front_Rk, scores_Rk = np.tile(np.arange(k), (num, 1)), chance_Rk.astype(np.float64)
        origin_B = np.repeat(np.arange(num), k)  # of each branch: whose hidden state it reads
        table_BP = self._pages.tables(slots_R, table_RP, ends_R, k, most - 1)
        for depth in range(1, most):
            num = int(np.count_nonzero(lens_R > depth))
            count, row_B = num * k, np.repeat(np.arange(num), k)
            at_B = ends_R[row_B] + depth - 1
            self._pages.fork(slots_R[:num], ends_R[:num], origin_B[:count], k, depth)
            store_B = self._pages.places(np.arange(count), at_B, ends_R[row_B])
            fed_B = torch.from_numpy(np.take_along_axis(tree.tokens[:num], front_Rk[:num], 1))
            if hidden_BD is not None:
                hidden_BD = hidden_BD[torch.from_numpy(origin_B[:count]).to(where)]
            out = self._step(
                at_B, store_B, table_BP[:count], slots_R[row_B], fed_B.flatten().to(where),
                hidden_BD,
            )  # fmt: skip
            hidden_BD = out.hidden_RD
            next_B = torch.from_numpy(at_B + 1).to(where)
            tokens_Bk, chance_Bk = draw.branches(out.logits_RV, next_B, rows_R[row_B], k)
            products = scores_Rk[:num, :, None] * chance_Bk.reshape(num, k, k)
            products_Rn, first = products.reshape(num, -1), tree.num
            tree.add(tokens_Bk.reshape(num, -1), products_Rn, np.repeat(front_Rk[:num], k, axis=1))
            best_Rk = np.argsort(-products_Rn, axis=1, kind="stable")[:, :k]
            front_Rk, scores_Rk = first + best_Rk, np.take_along_axis(products_Rn, best_Rk, 1)
            origin_B = (best_Rk // k + np.arange(num)[:, None] * k).flatten()
        return tree.best(self.shape.size)
