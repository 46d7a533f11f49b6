"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.base.registry import Registry
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup

BACKENDS = Registry(
    "--attention-backend",
    {
        "torch_native": "radixlm.attention.reference:TorchNativeBackend",
    },
)


def make_backend(
    name: str, kv_groups: Sequence[KvGroup], kernels: Kernels, device: torch.device
) -> AttentionBackend:
    """Build the backend called ``name``; ConfigError if there is none of that name."""
    return cast(AttentionBackend, BACKENDS.resolve(name)(tuple(kv_groups), kernels, device))
