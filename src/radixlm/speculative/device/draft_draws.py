"""Draw: the tokens that a draft model's logits propose.

Legend: R rows, one a request, B rows of branches of their trees, k branches, N rows whose draws
have noise, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.sampling.noise import draw_keys, gumbel_noise
from radixlm.sampling.table import SlotState


class Draw:
    """Draws drafts: for slots with these sampling parameters. ``ids_V``: the target's tokens of the
    draft's, None for the same, of which those from ``num_ids`` on are never drawn."""

    def __init__(
        self, states: Sequence[SlotState | None], ids_V: Tensor | None, num_ids: int
    ) -> None:
        self._ids_V, self._num_ids = ids_V, num_ids
        heats = [1.0 if s is None or s.is_greedy else max(s.temperature, 1e-3) for s in states]
        self._heat_R1: Tensor | None = None
        if any(heat != 1.0 for heat in heats):
            self._heat_R1 = torch.tensor(heats)[:, None]
        self._noisy = {
            row: (s.seed, sharpness(heats[row]))
            for row, s in enumerate(states)
            if s is not None and heats[row] > 1.0
        }

    def __call__(self, logits_RV: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """The target's ids of the tokens drafted for ``positions_R``, and the chance of each; of
        the first rows, as many as there are logits."""
        rows = range(len(logits_RV))
        logits_RV = self._scaled(logits_RV, slice(len(logits_RV)))
        highest_R, tokens_R = logits_RV.max(-1)
        if noisy := self._with_noise(logits_RV, positions_R, rows):
            tokens_R[noisy[0]] = noisy[1].argmax(-1)
            highest_R = logits_RV.gather(1, tokens_R[:, None])[:, 0]
        chance_R = torch.exp(highest_R - torch.logsumexp(logits_RV, -1))
        return (tokens_R if self._ids_V is None else self._ids_V[tokens_R]), chance_R

    def branches(
        self, logits_BV: Tensor, positions_B: Tensor, rows_B: NDArray[np.int64], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The same of branches of the rows ``rows_B``, on the host: the ``count`` best tokens of
        each, the best first, and their chances."""
        logits_BV = self._scaled(logits_BV, torch.from_numpy(rows_B))
        if noisy := self._with_noise(logits_BV, positions_B, rows_B.tolist()):
            logits_BV = logits_BV.index_copy(0, *noisy)
        best_Bk, tokens_Bk = logits_BV.topk(min(count, logits_BV.shape[1]))
        chance_Bk = torch.exp(best_Bk - torch.logsumexp(logits_BV, -1, keepdim=True))
        if self._ids_V is not None:
            tokens_Bk = self._ids_V[tokens_Bk]
        return tokens_Bk.cpu().numpy(), chance_Bk.float().cpu().numpy()

    def _scaled(self, logits_BV: Tensor, rows: slice | Tensor) -> Tensor:
        """Over the temperatures of the rows."""
        if self._ids_V is None:
            logits_BV = logits_BV[:, : self._num_ids]
        if self._heat_R1 is None:
            return logits_BV
        return logits_BV / self._heat_R1[rows].to(logits_BV.device)

    def _with_noise(
        self, logits_BV: Tensor, positions_B: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Rows that draw with the target's noise, int64 [N], and their logits with it [N, V]."""
        noisy = [(at, *self._noisy[row]) for at, row in enumerate(rows) if row in self._noisy]
        if not noisy:
            return None
        at_N, seeds_N = logits_BV.new_tensor([one[:2] for one in noisy], dtype=torch.int64).T
        sharp_N1 = logits_BV.new_tensor([[one[2]] for one in noisy])
        ids_V = self._ids_V
        if ids_V is None:
            ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
        noise_NV = gumbel_noise(draw_keys(seeds_N, positions_B[at_N]), ids_V[None].int())
        return at_N, logits_BV[at_N] * sharp_N1 + noise_NV


def sharpness(temperature: float) -> float:
    """What a drafter's logits over the temperature are multiplied with before the target's noise
    joins them: the less the noise decides, the surer the drafter should be. Up to temperature 1 it
    drafts the most probable token."""
    return 2.0 if temperature <= 2.0 else 1.0
