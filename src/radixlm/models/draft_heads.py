"""DraftHead: guesses one token, without keys and values: Medusa's heads (arXiv:2401.10774) and
those of MLP speculators (arXiv:2404.19124).

Legend: R rows, D channels of the target's hidden states, S of a speculator's state, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from radixlm.arch.draft import Draft
from radixlm.layers.context import LayerContext
from radixlm.layers.linear import Linear
from radixlm.layers.module import Module
from radixlm.models.drafts import DraftInputs, DraftModel
from radixlm.quant.param import Param

EPS = 1e-6


class DraftHead(DraftModel):
    """Head i guesses the token i + 2 places behind the one whose hidden state the first reads."""

    def guess(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """float32 logits [R, V], and what the next head reads; ``tokens_R``: the tokens before."""
        raise NotImplementedError


class MedusaInputs(DraftInputs):
    """The layers."""

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert spec.layers is not None
        dim = spec.decoder.dim
        self.residual = [
            context.linear(dim, dim, spec.layers.bias) for _ in range(spec.layers.count)
        ]


class MedusaHead(DraftHead):
    """All heads read the target's last hidden state."""

    inputs_kind = MedusaInputs
    draft: MedusaInputs

    def guess(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens have no influence."""
        x_RD = hidden_RD.to(self.context.compute_dtype)
        for layer in self.draft.residual:
            x_RD = x_RD + F.silu(layer.run(x_RD))
        return self._make_logits(x_RD), hidden_RD


class StateNorm(Module):
    """An RMS norm with a bias."""

    def __init__(self, dim: int) -> None:
        self.weight, self.bias = Param((dim,), "float32"), Param((dim,), "float32")

    def finish(self) -> None:
        self._weight_D, self._bias_D = self.weight.take(), self.bias.take()

    def run(self, x_RD: Tensor) -> Tensor:
        """In float32."""
        return _normed(x_RD) * self._weight_D + self._bias_D


class StateInputs(DraftInputs):
    """The projection of the state, and its norm."""

    project: Linear

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        super().__init__(spec, context)
        self.state_norm = StateNorm(spec.decoder.dim)


class StateHead(DraftHead):
    """The state of one head goes into the next one, with the token that was drafted."""

    inputs_kind = StateInputs
    draft: StateInputs

    def __init__(
        self,
        spec: Draft,
        context: LayerContext,
        weight_dtype: torch.dtype | None,
        number: int = 0,
    ) -> None:
        super().__init__(spec, context, weight_dtype, number)
        assert spec.state is not None
        self._state, self._is_first, width = spec.state, number == 0, spec.decoder.dim
        self.draft.project = context.linear(width if number else spec.target_dim, width)

    def guess(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind the tokens: [R, S]."""
        if self._is_first and self._state.norms_first:
            hidden_RD = _normed(hidden_RD) / math.sqrt(2)
        dtype = self.context.compute_dtype
        state_RS = self.draft.project.run(hidden_RD.to(dtype)).float()
        state_RS += self._embed_tokens(tokens_R).float() * self._state.token_weight
        state_RS = F.gelu(self.draft.state_norm.run(state_RS)).to(dtype)
        return self._make_logits(state_RS), state_RS


def _normed(x_RD: Tensor) -> Tensor:
    return F.rms_norm(x_RD.float(), x_RD.shape[-1:], eps=EPS)
