"""Two backends over one pool: one for steps that only decode, one for all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.attention.paged import PagedBackend
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import KvPool, PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch


class HybridBackend:
    """``prefill`` and ``decode`` by turns. Its name is the decoding one's, on which depends
    whether decode steps can be recorded as graphs."""

    def __init__(self, prefill: PagedBackend, decode: PagedBackend) -> None:
        self.prefill, self.decode = prefill, decode
        self.name = decode.name
        self.required_page_size = prefill.required_page_size or decode.required_page_size
        self.pools: Sequence[KvPool | None] = prefill.pools  # the shared ones, by group
        self._current = prefill

    def supports(self, page_size: int) -> bool:
        """What both support."""
        return self.prefill.supports(page_size) and self.decode.supports(page_size)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """What both support."""
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
        """Choose by the longest query: a step with any part of a prompt is the prefill one's."""
        self._current = self.decode if batch.max_query_len == 1 else self.prefill
        self._current.begin(batch)

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend: [T, heads * v_dim]."""
        return self._current.run(q_THD, k_TKD, v_TKV, site)
