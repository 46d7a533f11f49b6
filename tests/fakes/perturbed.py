"""Checkpoints of one model with other weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def perturbed(
    folder: Path, target: Path, seed: int = 1, change: Callable[[str], bool] | None = None
) -> Path:
    """A copy of the checkpoint ``folder`` in ``target`` with noise on its weights: on those whose
    name ``change`` accepts, or on all."""
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors"):
        tensors = {
            name: noisy(value, seed + place) if change is None or change(name) else value
            for place, (name, value) in enumerate(sorted(load_file(file).items()))
        }
        save_file(tensors, file, {"format": "pt"})
    return target


def noisy(value: Tensor, seed: int) -> Tensor:
    """``value`` plus a tenth of its spread; integers stay."""
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    spread = value.float().std().nan_to_num(1.0) if value.numel() > 1 else 1.0
    return (value.float() + 0.1 * spread * noise).to(value.dtype)
