"""MedusaHead: guesses one token from the target's last hidden state, without keys and values
(arXiv:2401.10774).

Legend: R rows, D channels, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from radixlm.arch.draft import Draft
from radixlm.layers.context import LayerContext
from radixlm.models.drafts import DraftInputs, DraftModel


class MedusaInputs(DraftInputs):
    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert spec.layers is not None
        dim = spec.decoder.dim
        self.residual = [
            context.linear(dim, dim, spec.layers.bias) for _ in range(spec.layers.count)
        ]


class MedusaHead(DraftModel):
    """Head i guesses the token i + 2 places behind the one whose hidden state it reads."""

    inputs_kind = MedusaInputs
    draft: MedusaInputs

    def guess(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits: [R, V]."""
        x_RD = hidden_RD.to(self.context.compute_dtype)
        for layer in self.draft.residual:
            x_RD = x_RD + F.silu(layer.run(x_RD))
        return self._make_logits(x_RD)
