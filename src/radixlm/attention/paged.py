"""Base classes of backends over PagedPool (pools/pool.py)."""

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from radixlm.attention.base import AttentionBackend
from radixlm.base.errors import ConfigError
from radixlm.kernels.dispatch import Kernels
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool, page_nbytes
from radixlm.step.batch import AttentionSite, ForwardBatch


class PagedBackend(AttentionBackend):
    """A backend over PagedPool; two such backends can share their pools."""

    pool_class: type[PagedPool] = PagedPool

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        self.device = device
        self.pools: list[PagedPool | None] = [None] * len(groups)
        self._batch: ForwardBatch | None = None

    def page_nbytes(self, group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the group's layers."""
        return page_nbytes(group, page_size, dtype)

    def make_pool(
        self, group: KvGroup, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> PagedPool:
        """Allocate and keep the group's pool."""
        pool = self.pool_class(group, num_pages, page_size, dtype, self.device)
        self.pools[group.index] = pool
        return pool


class PluginBackend(PagedBackend):
    """A backend whose kernels come from another package: ``module``, in the package ``install``.
    ``lacks``: fields of AttentionSite that have no kernel."""

    module = ""
    install = ""
    lacks: tuple[str, ...] = ()

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        super().__init__(groups, kernels, device)
        self.package: ModuleType = self._import()
        if any(group.latent for group in groups):
            raise self._unsupported("latent attention")
        self._checked: set[int] = set()

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(
                f"--attention-backend {self.name} needs the package {self.install} ({error}); "
                "--attention-backend triton works without"
            ) from error

    def _unsupported(self, what: str) -> ConfigError:
        return ConfigError(
            f"--attention-backend {self.name} has no kernel for {what}, which the model needs; "
            "--attention-backend triton works"
        )

    def begin(self, batch: ForwardBatch) -> None:
        if batch.bidirectional_spans:
            raise self._unsupported("tokens that see one another forwards")
        self._batch = batch

    def open_layer(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> tuple[ForwardBatch, PagedPool, Tensor, Tensor]:
        """Check the site and store K and V. Returns the batch, the pool, and the layer's K [P, B,
        K, C] and V [P, B, K, V]."""
        batch, pool = self._batch, self.pools[site.group]
        assert batch is not None and pool is not None, "begin() and make_pool() come first"
        if id(site) not in self._checked:
            for field in self.lacks:
                value = getattr(site, field)
                if isinstance(value, Tensor) or value:
                    raise self._unsupported(field)
            if pool.dtype != q_THD.dtype:
                raise ConfigError(
                    f"--kv-cache-dtype: --attention-backend {self.name} reads a cache of the "
                    f"model's {q_THD.dtype} and this one is {pool.dtype}; "
                    "--attention-backend triton works"
                )
            self._checked.add(id(site))
        if k_TKD is not None:
            pool.store(site.layer, batch.store_GT[site.group], k_TKD, v_TKV)
        assert pool.v_LPBKV is not None
        return batch, pool, pool.k_LPBKC[site.layer], pool.v_LPBKV[site.layer]
