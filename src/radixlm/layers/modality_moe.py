"""Experts by modality: those of text tokens, and others for the placeholder tokens of media.

Legend: T tokens, D model channels, S tokens of media.
"""

import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.layers.context import LayerContext
from radixlm.layers.moe import MoeLayer
from radixlm.step.batch import ForwardBatch


class ModalityMoeLayer(MoeLayer):
    """The mixture of text, and ``vision`` for media; both use the shared experts. The modality of
    a token depends on its id alone, so that cached pages can be shared."""

    def __init__(self, spec: Moe, dim: int, context: LayerContext) -> None:
        assert spec.vision is not None
        super().__init__(spec, dim, context)
        self.vision = MoeLayer(spec.vision, dim, context)
        self._boundary_tokens = torch.tensor(spec.marks, dtype=torch.int64, device=context.device)

    def run(
        self,
        x_TD: Tensor,
        routed_by_TD: Tensor | None = None,
        batch: ForwardBatch | None = None,
    ) -> Tensor:
        """As in ``MoeLayer``; each token by the experts of its modality."""
        assert batch is not None and routed_by_TD is None
        ids_T = batch.token_ids_T
        is_media_T = torch.isin(ids_T, self._boundary_tokens)
        if batch.media is not None and batch.media.mask_T is not None:
            is_media_T = is_media_T | batch.media.mask_T
        if batch.is_decode and x_TD.device.type != "cpu":  # a graph holds no choice by value
            return self.run_both(x_TD, is_media_T)
        media_S = is_media_T.nonzero()[:, 0]
        if not len(media_S):
            return super().run(x_TD)
        out_TD, text_T = torch.empty_like(x_TD), (~is_media_T).nonzero()[:, 0]
        out_TD[media_S] = self._run_vision(x_TD[media_S])
        if len(text_T):
            out_TD[text_T] = super().run(x_TD[text_T])
        return out_TD

    def run_both(self, x_TD: Tensor, is_media_T: Tensor) -> Tensor:
        """The same where every token passes both mixtures: [T, D]."""
        return torch.where(is_media_T[:, None], self._run_vision(x_TD), super().run(x_TD))

    def _run_vision(self, x_SD: Tensor) -> Tensor:
        y_SD = self.vision.run(x_SD)
        return y_SD if self.spec.shared is None else y_SD + self.shared.run(x_SD)
