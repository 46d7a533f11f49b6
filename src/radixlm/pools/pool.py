"""KvPool: the device tensors of a group's pages.

Legend: L layers of the group, P pages, B tokens a page, K KV heads, C channels of K, V of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from radixlm.pools.group import KvGroup


class KvPool(Protocol):
    """What executor, tiers and transfers need of a pool, whatever its layout."""

    group: KvGroup
    num_pages: int
    page_size: int
    dtype: torch.dtype

    @property
    def nbytes_per_page(self) -> int:
        """Device bytes of one page over all layers of the group."""
        ...

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages inside the pool, all layers; all reads happen before any write."""
        ...

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """K [n * B, K, C] and V [n * B, K, V] (None when latent) of a layer's pages, copied."""
        ...

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        """The inverse of ``read``."""
        ...


class PagedPool:
    """K and V as plain tensors [L, P, B, K, C]: the layout of the torch backends."""

    def __init__(
        self,
        group: KvGroup,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.num_pages, self.page_size = group, num_pages, page_size
        self.dtype = dtype
        shape = (len(group.layers), num_pages, page_size, group.kv_heads)
        # Zeros, not empty: a masked NaN still poisons a weighted sum.
        self.k_LPBKC = torch.zeros(*shape, group.head_dim, dtype=dtype, device=device)
        self.v_LPBKV: Tensor | None = None
        if not group.latent:
            self.v_LPBKV = torch.zeros(*shape, group.v_dim, dtype=dtype, device=device)

    @property
    def nbytes_per_page(self) -> int:
        return self.group.numbers_per_token * self.page_size * self.dtype.itemsize

    def flat_k(self, layer: int) -> Tensor:
        """A layer's K as a view [P * B, K, C]."""
        return self.k_LPBKC[layer].flatten(0, 1)

    def flat_v(self, layer: int) -> Tensor:
        """A layer's V as a view [P * B, K, V]; of a latent group, the front of K."""
        if self.v_LPBKV is None:
            return self.flat_k(layer)[..., : self.group.v_dim]
        return self.v_LPBKV[layer].flatten(0, 1)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        for tensor in (self.k_LPBKC, self.v_LPBKV):
            if tensor is not None:
                tensor[:, self._index(target)] = tensor[:, self._index(source)]

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        index = self._index(pages)
        k = self.k_LPBKC[layer, index].flatten(0, 1)
        return k, None if self.v_LPBKV is None else self.v_LPBKV[layer, index].flatten(0, 1)

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        index = self._index(pages)
        self.k_LPBKC[layer, index] = k.view(-1, self.page_size, *k.shape[1:]).to(self.dtype)
        if self.v_LPBKV is not None:
            assert v is not None, "a pool that stores V was given none"
            self.v_LPBKV[layer, index] = v.view(-1, self.page_size, *v.shape[1:]).to(self.dtype)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.as_tensor(pages, dtype=torch.int64, device=self.k_LPBKC.device)
