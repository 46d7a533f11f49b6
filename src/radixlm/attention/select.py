"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.base.errors import ConfigError
from radixlm.base.registry import Registry
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup

BACKENDS = Registry(
    "--attention-backend",
    {
        "torch_native": "radixlm.attention.reference:TorchNativeBackend",
        "cpu": "radixlm.attention.cpu:CpuBackend",
        "triton": "radixlm.attention.triton:TritonBackend",
    },
)


def make_backend(
    name: str, kv_groups: Sequence[KvGroup], kernels: Kernels, device: torch.device
) -> AttentionBackend:
    """Build the backend called ``name``; ConfigError if there is none of that name, or if it
    cannot run here."""
    backend = BACKENDS.resolve(name)
    if name == "cpu" and (device.type != "cpu" or not cpu.available):
        why = cpu.reason if device.type == "cpu" else f"the model is on {device.type}"
        raise ConfigError(f"--attention-backend cpu: {why}; torch_native works")
    return cast(AttentionBackend, backend(tuple(kv_groups), kernels, device))


def default_backend(device: torch.device, page_size: int | None = None) -> str:
    """The best backend for a device; one that takes pages of ``page_size``, if given."""
    fits = page_size is None or page_size % 16 == 0
    return "cpu" if device.type == "cpu" and cpu.available and fits else "torch_native"
