"""flashinfer: its wrappers over the paged cache, if flashinfer-python is installed.

A wrapper is planned on the host in each step for each kind of layer, so decode steps are not
captured as CUDA graphs. Not run on hardware: tests check the calls against the package's published
signatures.

Legend: T packed tokens, S sequences, P pages a sequence, N pages of all sequences.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.attention.flash import HALVES
from radixlm.attention.paged import PluginBackend
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch

WORKSPACE_BYTES = 128 << 20  # what flashinfer's documentation recommends


class FlashinferBackend(PluginBackend):
    """BatchDecode and BatchPrefill with paged KV cache."""

    name = "flashinfer"
    module = "flashinfer"
    install = "flashinfer-python"
    dtypes = HALVES
    lacks = ("sinks", "slopes", "chunk")

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        super().__init__(groups, kernels, device)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[object, ...], Any] = {}  # by kind of layer; they own memory
        self._planned: dict[tuple[object, ...], Any] = {}  # those planned in this step
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def begin(self, batch: ForwardBatch) -> None:
        """Keep the batch; wrappers are planned when a layer first needs them."""
        super().begin(batch)
        self._planned, self._tables = {}, {}

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend: [T, H * V]."""
        batch, pool, k_PBKC, v_PBKV = self.open_layer(q_THD, k_TKD, v_TKV, site)
        decodes = batch.max_query_len == 1 and site.head_dim == site.v_dim
        key = (
            decodes, site.group, site.heads, site.kv_heads, site.head_dim, site.v_dim, site.window,
            site.softcap, site.scale,
        )  # fmt: skip
        wrapper = self._planned.get(key)
        if wrapper is None:
            wrapper = self._wrappers.get(key) or self._make_wrapper(decodes)
            self._wrappers[key] = self._planned[key] = wrapper
            self._plan(wrapper, decodes, batch, pool, site, q_THD.dtype)
        out_THV: Tensor = wrapper.run(q_THD, (k_PBKC, v_PBKV))
        return out_THV.flatten(1)

    def _make_wrapper(self, decodes: bool) -> Any:
        if decodes:
            return self.package.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, kv_layout="NHD", use_tensor_cores=True
            )
        return self.package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD")

    def _plan(
        self,
        wrapper: Any,
        decodes: bool,
        batch: ForwardBatch,
        pool: PagedPool,
        site: AttentionSite,
        dtype: torch.dtype,
    ) -> None:
        pages = self._pages(batch, pool, site.group)
        shape = (site.heads, site.kv_heads, site.head_dim, pool.page_size)
        options = {
            "sm_scale": site.scale,
            "window_left": site.window - 1 if site.window else -1,
            "logits_soft_cap": site.softcap or None,
            "q_data_type": dtype,
            "kv_data_type": pool.dtype,
        }
        if decodes:
            wrapper.plan(*pages, *shape, **options)
        else:
            wrapper.plan(
                batch.query_start_S1, *pages, *shape, head_dim_vo=site.v_dim, causal=True, **options
            )

    def _pages(
        self, batch: ForwardBatch, pool: PagedPool, group: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """int32: start of each sequence's pages [S + 1], the pages [N], tokens in the last page
        [S]."""
        if group not in self._tables:
            table_SP, size = batch.page_table_GSP[group], pool.page_size
            count_S = (batch.kv_len_S + size - 1) // size
            start_S1 = torch.zeros(len(count_S) + 1, dtype=torch.int32, device=table_SP.device)
            start_S1[1:] = count_S.cumsum(0)
            is_used_SP = torch.arange(table_SP.shape[1], device=table_SP.device) < count_S[:, None]
            # entries before a window may be stale: any valid page does
            pages_N = table_SP[is_used_SP].clamp(0, pool.num_pages - 1)
            last_S = batch.kv_len_S - (count_S - 1) * size
            self._tables[group] = (start_S1, pages_N, last_S.int())
        return self._tables[group]
