"""Factors of queries by position: LogN scaling (``spec.LogNScaling``), and learned ones, also of
values and by what the token is.

Legend: T tokens, H heads, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import LogNScaling
from radixlm.kernels.ops.activation import sigmoid
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.quant.param import Param


def logn_scales(spec: LogNScaling, positions_T: Tensor) -> Tensor:
    """Factor of each token's query: float32 [T]."""
    periods = (positions_T.float() + spec.offset) / spec.period
    if spec.is_power:
        return torch.exp(spec.beta * torch.log1p(periods))
    periods = torch.floor(periods)
    return 1.0 + spec.beta * torch.log1p(periods)


class LearnedLogScaling(Module):
    """Of each head: bias + scale * log(1 + position)."""

    def __init__(self, scale: Param, bias: Param) -> None:
        """Both float32 [H]."""
        self.scale, self.bias = scale, bias

    def finish(self) -> None:
        self._scale_H, self._bias_H = self.scale.take(), self.bias.take()

    def run(self, q_THC: Tensor, positions_T: Tensor) -> Tensor:
        """The queries times their factors."""
        logs_T = torch.log1p(positions_T.float())
        factors_TH = self._scale_H * logs_T[:, None] + self._bias_H
        return q_THC * factors_TH[..., None].to(q_THC.dtype)


class TokenScaling(Module):
    """Factors of each head's query and value (``spec.AttentionExtras.scaled_by_token``)."""

    def __init__(self, heads: int, width: int, context: LayerContext) -> None:
        """``width``: of the joined projections of q, k and v."""
        self.q, self.v = (context.plain_linear(width, heads) for _ in range(2))
        self.rate = Param((heads,), "float32")

    def finish(self) -> None:
        self._rate_H = self.rate.take()

    def run(
        self, qkv_TN: Tensor, q_THC: Tensor, v_THC: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and values times their factors."""
        read = F.gelu(qkv_TN.float()).to(qkv_TN.dtype)
        logs_T1 = torch.log1p(positions_T.float())[:, None]
        by_place = sigmoid(self._rate_H * logs_T1) + 0.5
        q_TH, v_TH = (torch.tanh(one.run(read).float()) + by_place for one in (self.q, self.v))
        q, v = q_THC * q_TH[..., None], v_THC * v_TH[..., None]
        return q.to(q_THC.dtype), v.to(v_THC.dtype)
