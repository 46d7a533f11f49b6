"""Experts by the kind of a token: those of text, and others for the places of media.

Legend: T tokens, D model channels, S tokens of media.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.layers.context import LayerContext
from radixlm.layers.moe import MoeLayer
from radixlm.step.batch import ForwardBatch


class ModalityMoeLayer(MoeLayer):
    """The mixture of text, ``vision`` beside it; the shared experts serve both. A token's kind
    follows from its id alone, so that what the cache holds does not hang on how it came there."""

    def __init__(self, spec: Moe, dim: int, context: LayerContext) -> None:
        assert spec.vision is not None
        super().__init__(spec, dim, context)
        self.vision = MoeLayer(spec.vision, dim, context)
        self._marks = torch.tensor(spec.marks, dtype=torch.int64, device=context.device)

    def run(
        self,
        x_TD: Tensor,
        routed_by_TD: Tensor | None = None,
        batch: ForwardBatch | None = None,
    ) -> Tensor:
        """As in ``MoeLayer``; each token by the experts of its kind."""
        assert batch is not None and routed_by_TD is None
        ids_T = batch.token_ids_T
        is_seen_T = torch.isin(ids_T, self._marks)
        if batch.media is not None and batch.media.mask_T is not None:
            is_seen_T = is_seen_T | batch.media.mask_T
        if batch.is_decode and x_TD.device.type != "cpu":  # a graph holds no choice by value
            return self.run_both(x_TD, is_seen_T)
        seen_S = is_seen_T.nonzero()[:, 0]
        if not len(seen_S):
            return super().run(x_TD)
        out_TD, read = torch.empty_like(x_TD), (~is_seen_T).nonzero()[:, 0]
        out_TD[seen_S] = self._see(x_TD[seen_S])
        if len(read):
            out_TD[read] = super().run(x_TD[read])
        return out_TD

    def run_both(self, x_TD: Tensor, is_seen_T: Tensor) -> Tensor:
        """The same where all tokens pass all experts: [T, D]."""
        return torch.where(is_seen_T[:, None], self._see(x_TD), super().run(x_TD))

    def _see(self, x_SD: Tensor) -> Tensor:
        y_SD = self.vision.run(x_SD)
        return y_SD if self.spec.shared is None else y_SD + self.shared.run(x_SD)
