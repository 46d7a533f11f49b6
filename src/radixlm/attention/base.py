"""AttentionBackend: runs attention over the paged KV cache. It owns the pools and, from ``begin``
on, the metadata of the step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.attention.double_sparsity import DoubleSparsity
from radixlm.kernels.ops.kv import DTYPES
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import KvPool
from radixlm.step.batch import AttentionSite, ForwardBatch


class AttentionBackend(ABC):
    """One implementation of paged attention, which is also the batch's AttentionRunner."""

    name = ""
    required_page_size: int | None = None  # None: any
    takes_sparsity = False  # whether ``sparsity`` may be set, before pools are made
    sparsity: DoubleSparsity | None = None
    page_multiple = 1  # pools have pages of a multiple of so many tokens
    dtypes: tuple[torch.dtype, ...] = DTYPES  # of caches
    pools: Sequence[KvPool | None]  # one for each KV group; None until it is made

    def supports(self, page_size: int) -> bool:
        """Whether pages of ``page_size`` tokens work."""
        is_multiple = page_size >= 1 and page_size % self.page_multiple == 0
        return is_multiple and self.required_page_size in (None, page_size)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the cache may hold this dtype."""
        return dtype in self.dtypes

    @abstractmethod
    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers; needs no pool."""

    @abstractmethod
    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> KvPool:
        """Allocate the group's pool; the backend attends over it from now on."""

    @abstractmethod
    def begin(self, batch: ForwardBatch) -> None:
        """Prepare a step; called once, before the first layer."""

    @abstractmethod
    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store the step's K and V, attend: [T, heads * v_dim] in the dtype of q."""
