"""Rows of logits that verify drafted tokens, and which of the draws stand.

A draw depends on the logits, the seed and the position alone (noise.py), so a draft is accepted
exactly if it is the token that is drawn: the first draw that differs is the next token, and what
comes out is what would have come out without drafts.

Legend: N sequences with logits, R rows of logits.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DraftRows:
    """Row ``first_N1[n] + j`` draws the token of sequence n after its first j drafts.

    ``first_N1`` int64 [N + 1], on the host. ``next_R`` int64, on the device: the draft that follows
    each row, -1 behind the last row of a sequence, which has none."""

    def __init__(self, first_N1: NDArray[np.int64], next_R: Tensor) -> None:
        self.first_N1, self.next_R = first_N1, next_R

    @staticmethod
    def of(drafts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "DraftRows":
        """The rows of sequences with these drafts."""
        lens = np.array([len(tokens) for tokens in drafts], np.int64)
        after = [token for tokens in drafts for token in (*tokens, -1)]
        first_N1 = np.concatenate(([0], np.cumsum(lens + 1)))
        return DraftRows(first_N1, torch.tensor(after, dtype=torch.int64).to(device))

    @cached_property
    def sequence_R(self) -> NDArray[np.int64]:
        """The sequence of each row."""
        return np.repeat(np.arange(len(self.first_N1) - 1), np.diff(self.first_N1))

    @cached_property
    def num_before_R(self) -> NDArray[np.int64]:
        """How many drafts stand before each row's token."""
        return np.arange(self.first_N1[-1]) - self.first_N1[self.sequence_R]

    def before(self, row: int) -> list[int]:
        """The drafts before the token of ``row``; waits for the device."""
        tokens: list[int] = self.next_R[row - int(self.num_before_R[row]) : row].tolist()
        return tokens

    def accept(self, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens each sequence produced, int64 [N] (at least 1), and which of the drawn
        ``tokens_R`` these are, bool [R]; on the device, without waiting for it."""
        first_N1 = torch.from_numpy(self.first_N1).to(tokens_R.device, non_blocking=True)
        sequence_R = torch.from_numpy(self.sequence_R).to(tokens_R.device, non_blocking=True)
        # refusals before each row, of its own sequence: none leaves its token
        refused_R1 = _cumsum(tokens_R != self.next_R)
        is_kept_R = refused_R1[:-1] == refused_R1[first_N1[:-1]][sequence_R]
        kept_R1 = _cumsum(is_kept_R)
        return kept_R1[first_N1[1:]] - kept_R1[first_N1[:-1]], is_kept_R


def _cumsum(is_set_R: Tensor) -> Tensor:
    """How many are set before each place, and in all: int64 [R + 1]."""
    return torch.nn.functional.pad(is_set_R.cumsum(0), (1, 0))
