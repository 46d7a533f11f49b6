"""Factors of queries by position: LogN scaling (``spec.LogNScaling``), and learned ones.

Legend: T tokens, H heads, C channels.
"""

import torch
from torch import Tensor

from radixlm.arch.spec import LogNScaling
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
