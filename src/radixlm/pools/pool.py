"""KvPool: the device tensors of a group's pages.

Legend: L layers of the group, P pages, B tokens a page, K KV heads, C channels of K, V of V.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from radixlm.kernels.ops.kv import (
    INT4,
    SCALED,
    dequantize,
    indexable_view,
    num_groups,
    quantize,
    rotate,
    rotate_back,
    row_nbytes,
    stored_channels,
    to_kv,
)
from radixlm.pools.group import KvGroup
from radixlm.pools.memory import pool_tensor
from radixlm.step.batch import AttentionSite


class ChosenReader(Protocol):
    """Attends to a few tokens of a layer's cache."""

    def index(self, pages: Tensor) -> Tensor:
        """What stands behind the channels of a query in the rows of K of all tokens of pages:
        [n * B, K, R]."""

    def run(self, q_QHC: Tensor, pages: Tensor, chosen_GQN: Tensor) -> Tensor:
        """Outputs of the last Q of the N tokens of ``pages``, float32 [Q, H, V]; ``chosen_GQN``:
        bool, the tokens that each reads, a choice for as many heads each."""


class KvPool(Protocol):
    """The interface of pools of any layout."""

    group: KvGroup
    num_pages: int
    page_size: int
    dtype: torch.dtype

    @property
    def nbytes_per_page(self) -> int:
        """Device bytes of one page over all layers of the group."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All of its memory, as tensors [layers, pages, ...]; some may be empty."""

    def store(self, layer: int, slots_T: Tensor, k_TKC: Tensor, v_TKV: Tensor | None) -> None:
        """Write rows at slots (page * page_size + offset); no V where latent."""

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages inside the pool, all layers; all reads happen before any write."""

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """K [n * B, K, C] and V [n * B, K, V] (None when latent) of a layer's pages, copied."""

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        """The inverse of ``read``."""

    def chosen_reader(
        self, site: AttentionSite, width: int, runs: tuple[int, int]
    ) -> ChosenReader | None:
        """For queries of ``width`` channels that make so many choices of runs of so many tokens;
        None: there is no kernel for that."""


class PagedPool:
    """K and V as tensors [L, P, B, K, C], the layout of the torch and Triton backends. int8 rows
    have scales [L, P, B, K]; int4 rows are bytes [L, P, B, K, 16 G] with scales [L, P, B, K, G],
    K's rotated unless latent.
    ``page_size`` is B, the rows of a page: fewer than its tokens if tokens share a row."""

    def __init__(
        self,
        group: KvGroup,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        page_size = group.rows_per_page(page_size)
        self.group, self.num_pages, self.page_size = group, num_pages, page_size
        self.dtype = dtype
        self._is_rotated = dtype == INT4 and not group.latent
        shape = (len(group.layers), num_pages, page_size, group.kv_heads)
        # Zeros, not empty: a masked NaN would still spoil a weighted sum.
        self._dims = (group.head_dim,) if group.latent else (group.head_dim, group.v_dim)
        widths = [stored_channels(dim) // 2 if dtype == INT4 else dim for dim in self._dims]
        self.k_LPBKC = pool_tensor((*shape, widths[0]), dtype, device)
        self.v_LPBKV: Tensor | None = None
        if not group.latent:
            self.v_LPBKV = pool_tensor((*shape, widths[1]), dtype, device)
        self.scales = [
            pool_tensor(
                (*shape, num_groups(dim)) if dtype == INT4 else shape, SCALED[dtype], device
            )
            for dim in self._dims
            if dtype in SCALED
        ]
        self.rows = [self._rows_of(layer) for layer in range(len(group.layers))]

    def _rows_of(self, layer: int) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """A layer's K, V and scales as rows [P * B, ...], views of the pool."""
        k = self.k_LPBKC[layer].flatten(0, 1)
        v = None if self.v_LPBKV is None else self.v_LPBKV[layer].flatten(0, 1)
        return k, v, tuple(scale[layer].flatten(0, 1) for scale in self.scales)

    @property
    def tensors(self) -> Sequence[Tensor]:
        values = () if self.v_LPBKV is None else (self.v_LPBKV,)
        return (self.k_LPBKC, *values, *self.scales)

    @property
    def nbytes_per_page(self) -> int:
        return rows_nbytes(self.group, self.page_size, self.dtype)

    def store(self, layer: int, slots_T: Tensor, k_TKC: Tensor, v_TKV: Tensor | None) -> None:
        """Write rows at slots (page * page_size + offset)."""
        k_TKC = rotate(k_TKC) if self._is_rotated else k_TKC
        k, v, scales = self.rows[layer]
        self._put(k, scales[:1], slots_T, k_TKC)
        if v is not None:
            assert v_TKV is not None, "this pool stores V, but v is None"
            self._put(v, scales[1:], slots_T, v_TKV)

    def load(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K [..., K, C] and V [..., K, V] at slots of any shape, as ``dtype``."""
        stored_k, stored_v, scales = self.rows[layer]
        k = self._take(stored_k, scales[:1], slots, self._dims[0])
        k = (rotate_back(k) if self._is_rotated else k).to(dtype)
        if stored_v is None:
            return k, k[..., : self.group.v_dim]
        return k, self._take(stored_v, scales[1:], slots, self._dims[-1]).to(dtype)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        for tensor in self.tensors:
            pages = indexable_view(tensor)
            pages[:, self._index(target)] = pages[:, self._index(source)]

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float32 if self.dtype in SCALED else self.dtype
        k, v = self.load(layer, self._slots(pages), dtype)
        return k, None if self.group.latent else v

    def write(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor | None) -> None:
        self.store(layer, self._slots(pages), k, v)

    def chosen_reader(self, site: AttentionSite, width: int, runs: tuple[int, int]) -> None:
        """There is no kernel for it."""

    def _put(self, flat: Tensor, scales: tuple[Tensor, ...], slots: Tensor, rows: Tensor) -> None:
        if scales:
            flat[slots], scales[0][slots] = quantize(rows, self.dtype)
        else:
            indexable_view(flat)[slots] = indexable_view(to_kv(rows, self.dtype))

    def _take(self, flat: Tensor, scales: tuple[Tensor, ...], slots: Tensor, dim: int) -> Tensor:
        if scales:
            return dequantize(flat[slots], scales[0][slots], dim)
        return indexable_view(flat)[slots].view(self.dtype)

    def _slots(self, pages: Sequence[int]) -> Tensor:
        offsets = torch.arange(self.page_size, device=self.k_LPBKC.device)
        return (self._index(pages)[:, None] * self.page_size + offsets).flatten()

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.as_tensor(pages, dtype=torch.int64, device=self.k_LPBKC.device)


def page_nbytes(group: KvGroup, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over the group's layers, scales included."""
    return rows_nbytes(group, group.rows_per_page(page_size), dtype)


def rows_nbytes(group: KvGroup, num_rows: int, dtype: torch.dtype) -> int:
    """Bytes of ``num_rows`` rows over the group's layers, scales included."""
    rows = row_nbytes(group.head_dim, dtype)
    if not group.latent:
        rows += row_nbytes(group.v_dim, dtype)
    return len(group.layers) * group.kv_heads * num_rows * rows
