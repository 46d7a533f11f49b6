"""Muon: momentum whose matrices are made orthogonal, several layers in one product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz of the Muon note (K. Jordan)


def orthogonal(update: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest half-orthogonal matrices of a stack [N, rows, columns], about."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    flip = x.shape[1] > x.shape[2]
    x = x.mT if flip else x
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).contiguous()
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if flip else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; every parameter is a stack [N, out, in]."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every stack in place."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                held = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(held, group["momentum"]))
                scale = max(1.0, p.shape[1] / p.shape[2]) ** 0.5
                p.mul_(1 - group["lr"] * 0.02).add_(update, alpha=-group["lr"] * scale)
