"""Rows of logits that verify drafted tokens, and which of the draws stand.

A draw depends on the logits, the seed and the position alone (noise.py), so a draft is accepted
exactly if it is the token that is drawn: the first draw that differs is the next token, and what
comes out is what would have come out without drafts.

A tree of drafts is verified path by path, each a sequence of its own. Paths draw the same token
behind the same tokens, so the path with the most accepted drafts gives what all of them give.

Legend: N sequences with results, P further paths of some of them, A = N + P, R rows of logits.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record


class Accepted(Record, eq=False):
    """On the device: how many tokens each sequence produced, ``counts_N`` int64 (at least 1), and
    which draws these are, ``kept_R`` bool. ``chosen_N`` int64: the sequence or path that gave them;
    None without further paths."""

    counts_N: Tensor
    kept_R: Tensor
    chosen_N: Tensor | None = None


class DraftRows:
    """Row ``first_A1[n] + j`` draws the token of sequence n after its first j drafts.

    ``first_A1`` int64 [A + 1], on the host. ``next_R`` int64, on the device: the draft that follows
    each row, -1 behind the last row of a sequence, which has none. ``owners_P`` int64, on the host:
    the sequences of which the last P are further paths."""

    def __init__(
        self,
        first_A1: NDArray[np.int64],
        next_R: Tensor,
        owners_P: NDArray[np.int64] | None = None,
    ) -> None:
        self.first_A1, self.next_R, self.owners_P = first_A1, next_R, owners_P

    @staticmethod
    def of(drafts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "DraftRows":
        """The rows of sequences with these drafts."""
        lens = np.array([len(tokens) for tokens in drafts], np.int64)
        after = [token for tokens in drafts for token in (*tokens, -1)]
        first_A1 = np.concatenate(([0], np.cumsum(lens + 1)))
        return DraftRows(first_A1, torch.tensor(after, dtype=torch.int64).to(device))

    @cached_property
    def sequence_R(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.first_A1) - 1), np.diff(self.first_A1))

    @cached_property
    def num_before_R(self) -> NDArray[np.int64]:
        """How many drafts stand before each row's token."""
        return np.arange(self.first_A1[-1]) - self.first_A1[self.sequence_R]

    def before(self, row: int) -> list[int]:
        """The drafts before the token of ``row``; waits for the device."""
        tokens: list[int] = self.next_R[row - int(self.num_before_R[row]) : row].tolist()
        return tokens

    def accept(self, tokens_R: Tensor) -> Accepted:
        """Which of the drawn ``tokens_R`` stand; without waiting for the device."""
        first_A1 = torch.from_numpy(self.first_A1).to(tokens_R.device, non_blocking=True)
        sequence_R = torch.from_numpy(self.sequence_R).to(tokens_R.device, non_blocking=True)
        # refusals before each row, of its own sequence: none leaves its token
        refused_R1 = _cumsum(tokens_R != self.next_R)
        is_kept_R = refused_R1[:-1] == refused_R1[first_A1[:-1]][sequence_R]
        kept_R1 = _cumsum(is_kept_R)
        counts_A = kept_R1[first_A1[1:]] - kept_R1[first_A1[:-1]]
        if self.owners_P is None:
            return Accepted(counts_A, is_kept_R)
        num = len(counts_A)
        ranks_A = counts_A * num + torch.arange(num - 1, -1, -1, device=counts_A.device)
        owners_P = torch.from_numpy(self.owners_P).to(counts_A.device, non_blocking=True)
        best_N, others_P = ranks_A[: -len(owners_P)], ranks_A[-len(owners_P) :]
        best_N = best_N.scatter_reduce(0, owners_P, others_P, "amax")
        chosen_N = num - 1 - best_N % num
        is_chosen_A = torch.zeros_like(counts_A, dtype=torch.bool)
        is_chosen_A[chosen_N] = True
        return Accepted(best_N // num, is_kept_R & is_chosen_A[sequence_R], chosen_N)


def _cumsum(is_set_R: Tensor) -> Tensor:
    """How many are set before each place, and in all: int64 [R + 1]."""
    return torch.nn.functional.pad(is_set_R.cumsum(0), (1, 0))
