"""cpu: paged attention by the C++ kernels. K stands transposed in tiles of 16 tokens, so pages hold
a multiple of 16; every result is the same bit for bit whatever else is in the batch and however
a prompt was cut into chunks.

Legend: T packed tokens, H query heads, K KV heads, C channels of K, V of V, L layers, P pages, B
tokens a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixlm.attention.gathered import attend_gathered
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import (
    DTYPES,
    TILE,
    CacheShape,
    pages_from_k,
    pages_from_v,
    tokens_of_k,
    tokens_of_v,
)
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.rope import kv_store
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch


class CpuPool:
    """K [L, P, K, B / 16, C, 16] and V [L, P, K, B, V]. A latent group stores V too, as the
    kernel reads V row by row."""

    def __init__(self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.group, self.num_pages, self.page_size = group, num_pages, page_size
        self.dtype = dtype
        self.shape = CacheShape(group.kv_heads, group.head_dim, group.v_dim, page_size, dtype)
        num_layers = len(group.layers)
        self.k = torch.empty(num_layers, *self.shape.k_shape(num_pages), dtype=dtype)
        self.v = torch.empty(num_layers, *self.shape.v_shape(num_pages), dtype=dtype)
        for tensor in (self.k, self.v):  # pages of 16 tokens are far apart for the TLB
            native().advise_huge(tensor.data_ptr(), tensor.nbytes)

    @property
    def nbytes_per_page(self) -> int:
        return page_nbytes(self.group, self.page_size, self.dtype)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        to, of = torch.as_tensor(target), torch.as_tensor(source)
        self.k[:, to] = self.k[:, of]
        self.v[:, to] = self.v[:, of]

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        index = torch.as_tensor(pages)
        k = tokens_of_k(self.k[layer, index])
        return k, None if self.group.latent else tokens_of_v(self.v[layer, index])

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        index = torch.as_tensor(pages)
        v = k[..., : self.group.v_dim] if v is None else v
        self.k[layer, index] = pages_from_k(k.to(self.dtype), self.page_size)
        self.v[layer, index] = pages_from_v(v.to(self.dtype), self.page_size)


def page_nbytes(group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over the group's layers."""
    channels = group.head_dim + group.v_dim
    return len(group.layers) * group.kv_heads * channels * page_size * dtype.itemsize


@dataclass(slots=True)
class _Layer:
    """One attention layer, ready to run."""

    attention: PagedAttention
    k_cache: Tensor
    v_cache: Tensor


class CpuBackend:
    """The C++ kernels behind the backend protocol."""

    name = "cpu"
    required_page_size: int | None = None

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        self.pools: list[CpuPool | None] = [None] * len(groups)
        self._layers: list[dict[int, _Layer]] = [{} for _ in groups]
        self._batch: ForwardBatch | None = None
        self._max_kv_len = 0
        self._readers: dict[int, _Layer] = {}  # of sites that store nothing, by identity
        self.slots: list[Tensor] = []  # int32, of the step, a group each
        self.tables: list[Tensor] = []

    def supports(self, page_size: int) -> bool:
        """Multiples of 16."""
        return page_size >= TILE and page_size % TILE == 0

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """float32, bfloat16 and float16 caches; arithmetic is float32."""
        return dtype in DTYPES

    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers."""
        return page_nbytes(group, page_size, dtype)

    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> CpuPool:
        """Allocate and keep the group's pool; memory is taken as pages are first written."""
        pool = CpuPool(group, num_pages, page_size, dtype)
        self.pools[group.index] = pool
        self._layers[group.index] = {}
        self._readers = {}
        return pool

    def begin(self, batch: ForwardBatch) -> None:
        """Bring the step's tables to the kernels' integers."""
        self._batch, self._max_kv_len = batch, batch.max_kv_len
        self.slots = [slots.int() for slots in batch.store_GT]
        self.tables = [table.int().contiguous() for table in batch.page_table_GSP]
        self.starts = batch.query_start_S1.int()
        self.kv_len = batch.kv_len_S.int()

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend."""
        group = site.group
        if site.stores:
            layer = self._layers[group].get(site.layer) or self._open(site)
        else:
            layer = self._readers.get(id(site)) or self._open_reader(site)
        q = _dense(q_THD)
        if k_TKD is not None:
            k = _dense(k_TKD)
            v = k[..., : site.v_dim] if v_TKV is None else _dense(v_TKV)
            kv_store(k, v, (layer.k_cache, layer.v_cache), self.slots[group])
        if site.slopes is not None or 0 < site.chunk < self._max_kv_len:
            assert self._batch is not None
            return attend_gathered(q, layer.k_cache, layer.v_cache, self._batch, site)
        out = layer.attention.run(
            q, layer.k_cache, layer.v_cache, self.tables[group], self.starts, self.kv_len
        )
        return out.flatten(1)

    def _open(self, site: AttentionSite) -> _Layer:
        layer = self._make(site)
        self._layers[site.group][site.layer] = layer
        return layer

    def _open_reader(self, site: AttentionSite) -> _Layer:
        """A layer that reads the cache of another one, with heads and window of its own."""
        layer = self._readers[id(site)] = self._make(site)
        return layer

    def _make(self, site: AttentionSite) -> _Layer:
        pool = self.pools[site.group]
        assert pool is not None, "make_pool() comes first"
        options: dict[str, Any] = {"window": site.window, "softcap": site.softcap}
        attention = PagedAttention(
            site.heads, pool.shape, site.scale, sinks_H=site.sinks, **options
        )
        return _Layer(attention, pool.k[site.layer], pool.v[site.layer])


def _dense(x_THC: Tensor) -> Tensor:
    """Float32 with each token's heads in one row, as the kernels want it."""
    if x_THC.dtype == torch.float32 and x_THC.stride(2) == 1:
        if x_THC.stride(1) == x_THC.shape[2] or x_THC.shape[1] == 1:
            return x_THC
    return x_THC.float().contiguous()
