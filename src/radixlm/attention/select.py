"""Chooses the attention backend by name, and pairs two of them for prefill and decode."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from radixlm.attention.base import AttentionBackend
from radixlm.attention.double_sparsity import DoubleSparsity
from radixlm.attention.paged import PagedBackend
from radixlm.base.errors import ConfigError
from radixlm.base.registry import Registry
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import KvPool, PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch

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
    sparsity: DoubleSparsity | None = None,
    is_invariant: bool = False,
) -> AttentionBackend:
    """Build the backend called ``name``, or a HybridBackend if ``prefill`` and ``decode`` differ.
    ``sparsity``: of its layers that see all tokens. ``is_invariant``: results may not depend on
    the batch, which those of backends without ``keep_batch_invariant`` never or always do.
    ConfigError for an unknown name, a backend that cannot run here, or two that cannot share a
    pool."""
    prefill, decode = prefill or name, decode or name
    first = _make(prefill, kv_groups, kernels, device)
    if sparsity is not None:
        if prefill != decode or not first.takes_sparsity:
            raise ConfigError(
                f"--enable-double-sparsity: --attention-backend {prefill} with {decode} for decode "
                "has no kernel for it; cpu, triton and torch_native have, for both"
            )
        first.sparsity = sparsity
    if is_invariant and (keep := getattr(first, "keep_batch_invariant", None)) is not None:
        keep()
    if prefill == decode:
        return first
    second = _make(decode, kv_groups, kernels, device)
    return HybridBackend(*(_with_plain_pool(x, prefill, decode) for x in (first, second)))


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


def _with_plain_pool(backend: AttentionBackend, prefill: str, decode: str) -> PagedBackend:
    """The backend, if its pool has the plain layout."""
    if isinstance(backend, PagedBackend):
        return backend
    raise ConfigError(
        f"--prefill-attention-backend {prefill} and --decode-attention-backend {decode} cannot "
        f"share a KV cache: {backend.name}'s has a layout of its own; "
        f"{backend.name} for both works"
    )


class HybridBackend(AttentionBackend):
    """``decode`` for steps that only decode, ``prefill`` for all others, over one pool. It has the
    decode backend's name, because that decides whether decode steps can be captured as CUDA
    graphs."""

    def __init__(self, prefill: PagedBackend, decode: PagedBackend) -> None:
        self.prefill, self.decode = prefill, decode
        self.name = decode.name
        self.required_page_size = prefill.required_page_size or decode.required_page_size
        self.page_multiple = math.lcm(prefill.page_multiple, decode.page_multiple)
        self.pools: Sequence[KvPool | None] = prefill.pools  # shared, by group
        self._current = prefill

    def supports(self, page_size: int) -> bool:
        """Whether both do."""
        return self.prefill.supports(page_size) and self.decode.supports(page_size)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether both do."""
        return self.prefill.supports_dtype(dtype) and self.decode.supports_dtype(dtype)

    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers."""
        return self.prefill.page_nbytes(group, page_size, dtype)

    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> PagedPool:
        """Allocate the group's pool for both."""
        pool = self.prefill.make_pool(group, num_pages, page_size, dtype)
        self.decode.pools[group.index] = pool
        return pool

    def begin(self, batch: ForwardBatch) -> None:
        """Choose by the longest query: a step with any part of a prompt runs on ``prefill``."""
        self._current = self.decode if batch.max_query_len == 1 else self.prefill
        self._current.begin(batch)

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend: [T, heads * v_dim]."""
        return self._current.run(q_THD, k_TKD, v_TKV, site)


def default_backend(device: torch.device) -> str:
    """The fastest backend for a device."""
    if device.type == "cpu" and cpu.available:
        return "cpu"
    if device.type == "cuda" and find_spec("triton") is not None:
        return "triton"
    return "torch_native"
