"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import cast

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.attention.mixed import HybridBackend
from radixlm.attention.paged import PagedBackend
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
        "flashinfer": "radixlm.attention.flashinfer:FlashinferBackend",
        "fa3": "radixlm.attention.flash:Fa3Backend",
        "fa4": "radixlm.attention.flash:Fa4Backend",
    },
)


def make_backend(
    name: str,
    kv_groups: Sequence[KvGroup],
    kernels: Kernels,
    device: torch.device,
    prefill: str | None = None,
    decode: str | None = None,
) -> AttentionBackend:
    """Build the backend called ``name``, or one that turns to ``prefill`` and ``decode`` where
    these are given and differ; ConfigError if there is none of that name, if it cannot run here,
    or if the two cannot share a pool."""
    prefill, decode = prefill or name, decode or name
    first = _make(prefill, kv_groups, kernels, device)
    if prefill == decode:
        return first
    second = _make(decode, kv_groups, kernels, device)
    return HybridBackend(*(_plain(x, prefill, decode) for x in (first, second)))


def _make(
    name: str, kv_groups: Sequence[KvGroup], kernels: Kernels, device: torch.device
) -> AttentionBackend:
    if name == "triton" and find_spec("triton") is None:
        raise ConfigError(
            "--attention-backend triton needs the package triton; torch_native works without"
        )
    backend = BACKENDS.resolve(name)
    if name == "cpu" and (device.type != "cpu" or not cpu.available):
        why = cpu.reason if device.type == "cpu" else f"the model is on {device.type}"
        raise ConfigError(f"--attention-backend cpu: {why}; torch_native works")
    return cast(AttentionBackend, backend(tuple(kv_groups), kernels, device))


def _plain(backend: AttentionBackend, prefill: str, decode: str) -> PagedBackend:
    """The backend, if its pool has the plain layout."""
    if isinstance(backend, PagedBackend):
        return backend
    raise ConfigError(
        f"--prefill-attention-backend {prefill} and --decode-attention-backend {decode} cannot "
        f"share a KV cache: {backend.name}'s has a layout of its own; "
        f"{backend.name} for both works"
    )


def default_backend(device: torch.device, page_size: int | None = None) -> str:
    """The best backend for a device; one that takes pages of ``page_size``, if given."""
    fits = page_size is None or page_size % 16 == 0
    if device.type == "cpu" and cpu.available and fits:
        return "cpu"
    if device.type == "cuda" and find_spec("triton") is not None:
        return "triton"
    return "torch_native"
