"""Repetition, frequency and presence penalties: token counts by slot, kept only where needed.

For a token seen ``c`` times in the output (and maybe in the prompt):
  repetition p: logit / p if positive, logit * p if not   (prompt and output; after Keskar 2019)
  frequency f:  logit - f * c                             (output only)
  presence q:   logit - q if c > 0                        (output only)
in this order.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from radixlm.sampling.drafts import DraftRows

_LOWEST_REPETITION = 1e-6  # the API allows 0, which would divide by zero


class PenaltyCounts:
    """Counts of output tokens and seen prompt tokens, for the slots that have a penalty.

    ``_counts_NV`` int32 and ``_seen_NV`` bool have a row for each such slot, by ``_row_of``.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._host_values: dict[int, tuple[float, float, float]] = {}
        self._counts_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seen_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._values_N3 = torch.zeros(0, 3, dtype=torch.float32, device=device)

    def __contains__(self, slot: int) -> bool:
        return slot in self._row_of

    def set(
        self,
        slot: int,
        repetition: float,
        frequency: float,
        presence: float,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Start counting for ``slot`` with its request's tokens so far."""
        if not self._free:
            self._grow()
        row = self._row_of[slot] = self._free.pop()
        values = [max(repetition, _LOWEST_REPETITION), frequency, presence]
        self._values_N3[row] = self._to_device(torch.tensor(values))
        self._host_values[row] = (values[0], values[1], values[2])
        counts = self._count(output_ids)
        self._counts_NV[row] = counts
        self._seen_NV[row] = (self._count(prompt_ids) > 0) | (counts > 0)

    def clear(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def addresses(self, slot: int) -> tuple[int, int, tuple[float, float, float]] | None:
        """Addresses of a slot's seen tokens and counts, and its repetition, frequency and presence
        penalties; None if it has none. For host code; addresses change when slots are set."""
        row = self._row_of.get(slot)
        if row is None:
            return None
        seen = self._seen_NV.data_ptr() + row * self._vocab_size
        counts = self._counts_NV.data_ptr() + 4 * row * self._vocab_size
        return seen, counts, self._host_values[row]

    def rows_of(self, slot: int) -> tuple[int, int, int]:
        """Addresses of a slot's seen tokens, counts and penalties, zeros if it has none; for
        kernels on the tables' device. They change when slots are set."""
        row = self._row_of.get(slot)
        if row is None:
            return 0, 0, 0
        tables = (self._seen_NV, self._counts_NV, self._values_N3)
        seen, counts, values = (t.data_ptr() + row * t.stride(0) * t.itemsize for t in tables)
        return seen, counts, values

    def record(self, slots: Sequence[int], tokens_R: Tensor) -> None:
        """Count the new output token of each row; rows of other slots are left out."""
        if not self._row_of:
            return
        selected = [(r, self._row_of[slot]) for r, slot in enumerate(slots) if slot in self._row_of]
        if not selected:
            return
        index = torch.tensor(selected, device=self._device)
        tokens, rows = tokens_R[index[:, 0]], index[:, 1]
        ones = torch.ones_like(rows, dtype=torch.int32)
        self._counts_NV.index_put_((rows, tokens), ones, accumulate=True)
        self._seen_NV.index_put_((rows, tokens), ones.bool())

    def apply_(
        self, logits_RV: Tensor, slots: Sequence[int], drafts: DraftRows | None = None
    ) -> None:
        """Penalise rows in place. With ``drafts`` a row also counts the drafts before it."""
        selected = [(r, self._row_of[slot]) for r, slot in enumerate(slots) if slot in self._row_of]
        if not selected:
            return
        if drafts is not None:
            self._apply_drafts_(logits_RV, slots, drafts)
            return
        if self._device.type != "cpu":
            index = torch.tensor(selected, device=self._device)
            counts_PV, seen_PV = self._counts_NV[index[:, 1]], self._seen_NV[index[:, 1]]
            logits_PV = logits_RV[index[:, 0]]
            changed_PV = _penalise(logits_PV, counts_PV, self._values_N3[index[:, 1], None])
            logits_RV[index[:, 0]] = torch.where(seen_PV, changed_PV, logits_PV)
            return
        for r, row in selected:  # few tokens of the vocabulary were seen
            ids_K = torch.from_numpy(np.flatnonzero(self._seen_NV[row].numpy()))
            values_3, counts_K = self._values_N3[row], self._counts_NV[row, ids_K]
            logits_RV[r, ids_K] = _penalise(logits_RV[r, ids_K], counts_K, values_3)

    def _apply_drafts_(self, logits_RV: Tensor, slots: Sequence[int], drafts: DraftRows) -> None:
        """``apply_`` by sequence; only tokens that were seen or drafted (K of them) can change."""
        bounds = drafts.first_A1.tolist()
        for first, end in pairwise(bounds):
            row = self._row_of.get(slots[first])
            if row is None:
                continue
            drafted_J = drafts.next_R[first : end - 1]
            seen_V = self._seen_NV[row].index_fill(0, drafted_J, True)
            ids_K = seen_V.nonzero()[:, 0]
            is_next_JK = drafted_J[:, None] == ids_K
            counts_JK = torch.nn.functional.pad(is_next_JK.cumsum(0), (0, 0, 1, 0))
            counts_JK += self._counts_NV[row, ids_K]
            logits_JK = logits_RV[first:end, ids_K]
            changed_JK = _penalise(logits_JK, counts_JK, self._values_N3[row])
            is_seen_JK = self._seen_NV[row, ids_K] | (counts_JK > 0)
            logits_RV[first:end, ids_K] = torch.where(is_seen_JK, changed_JK, logits_JK)

    def _count(self, ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor(list(ids), dtype=torch.int64)
        counts = torch.bincount(tokens, minlength=self._vocab_size)[: self._vocab_size]
        return self._to_device(counts.int())

    def _to_device(self, values: Tensor) -> Tensor:
        """Copy to the device without waiting for its queued steps."""
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)

    def _grow(self) -> None:
        old = self._counts_NV.shape[0]
        num = max(4, old)
        self._counts_NV = _extend(self._counts_NV, num)
        self._seen_NV = _extend(self._seen_NV, num)
        self._values_N3 = _extend(self._values_N3, num)
        self._free = list(range(old + num - 1, old - 1, -1))


def _penalise(logits: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Logits of tokens that were seen; ``values`` [..., 3]: repetition, frequency, presence."""
    repetition, frequency, presence = values.unbind(-1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return scaled - frequency * counts - presence * (counts > 0)


def _extend(table: Tensor, num_rows: int) -> Tensor:
    return torch.cat([table, table.new_zeros(num_rows, table.shape[1])])
