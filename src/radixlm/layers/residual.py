"""How a branch joins the residual stream. Legend: T tokens, D model channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from radixlm.layers.module import Module
from radixlm.quant.param import Param

MIN_SQUARE = 1e-3  # of the residual's factor, where gates share one between it and the branch

Join = Callable[[Tensor, Tensor], Tensor]  # (residual, branch) -> residual, all [T, D]
Factor = float | Tensor | None  # a number, one a channel [D], or none


def added(x_TD: Tensor, pending_TD: Tensor | None) -> Tensor:
    """``x += pending`` in place, where there is any."""
    if pending_TD is not None:
        x_TD += pending_TD
    return x_TD


def weighted_sum(residual: Factor, branch: Factor) -> Join:
    """residual * x + branch * y."""

    def join(x_TD: Tensor, y_TD: Tensor) -> Tensor:
        assert residual is not None
        return (x_TD * residual + (y_TD if branch is None else y_TD * branch)).to(x_TD.dtype)

    return join


def gated_sum(gate_D: Tensor) -> Join:
    """A weighted sum whose factors' squares sum to one."""
    share = torch.sigmoid(gate_D)
    kept = torch.sqrt((torch.sigmoid(-gate_D) * (1.0 + share)).clamp(min=MIN_SQUARE))
    return weighted_sum(kept, share)


class AffineResidual(Module):
    """(x + a) * b + (branch + c) * d, learned numbers a channel."""

    def __init__(self, dim: int) -> None:
        for name in ("stream_bias", "stream_scale", "branch_bias", "branch_scale"):
            setattr(self, name, Param((dim,), "float32"))

    def finish(self) -> None:
        params = vars(self)
        self._stream = params["stream_bias"].take(), params["stream_scale"].take()
        self._branch = params["branch_bias"].take(), params["branch_scale"].take()

    def run(self, x_TD: Tensor, branch_TD: Tensor) -> Tensor:
        """The sum: [T, D]."""
        (bias, scale), (moved, scaled) = self._stream, self._branch
        joined: Tensor = (branch_TD + moved) * scaled + (x_TD + bias) * scale
        return joined.to(x_TD.dtype)
