"""The paged cache as the kernels lay it out.

K is transposed in tiles of 16 tokens, [P, K, B / 16, C, 16], so that 16 scores are one chain of
multiply-adds; V is plain, [P, K, B, V]. Legend: P pages, B tokens a page, K KV heads, C channels of
K, V of V. Slot number = page * B + offset in the page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import dtype_code

TILE = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Geometry of one layer's cache."""

    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.page_size % TILE or self.page_size <= 0:
            raise ValueError(f"page_size must be a multiple of {TILE}, got {self.page_size}")
        if self.dtype not in DTYPES:
            raise TypeError(f"a cache of {self.dtype} has no kernel")

    def k_shape(self, num_pages: int) -> tuple[int, ...]:
        """[P, K, B / 16, C, 16]"""
        return (num_pages, self.kv_heads, self.page_size // TILE, self.k_dim, TILE)

    def v_shape(self, num_pages: int) -> tuple[int, ...]:
        """[P, K, B, V]"""
        return (num_pages, self.kv_heads, self.page_size, self.v_dim)

    def allocate(self, num_pages: int) -> tuple[Tensor, Tensor]:
        """Fresh (K, V). Pages are never read before they are written, so no zeroing."""
        return (
            torch.empty(self.k_shape(num_pages), dtype=self.dtype),
            torch.empty(self.v_shape(num_pages), dtype=self.dtype),
        )

    def fields(self, k_cache: Tensor, v_cache: Tensor) -> tuple[int, ...]:
        """What the extension wants to know, tensors checked."""
        for name, cache, shape in (
            ("k_cache", k_cache, self.k_shape(k_cache.shape[0])),
            ("v_cache", v_cache, self.v_shape(v_cache.shape[0])),
        ):
            if tuple(cache.shape) != shape or cache.dtype != self.dtype:
                raise ValueError(f"{name}: expected {shape} {self.dtype}, got {cache.shape}")
            if not cache.is_contiguous():
                raise ValueError(f"{name}: must be contiguous")
        return (
            k_cache.data_ptr(), v_cache.data_ptr(), dtype_code(self.dtype, "cache"),
            self.kv_heads, self.k_dim, self.v_dim, self.page_size,
        )  # fmt: skip


def shape_of(k_cache: Tensor, v_cache: Tensor) -> CacheShape:
    """The geometry of a pair of cache tensors."""
    _, heads, tiles, k_dim, _ = k_cache.shape
    return CacheShape(heads, k_dim, v_cache.shape[3], tiles * TILE, k_cache.dtype)


def tokens_of_k(k_cache: Tensor) -> Tensor:
    """K pages as tokens: [P, K, B/16, C, 16] -> [P * B, K, C] (a copy)."""
    pages, heads, tiles, dim, _ = k_cache.shape
    return k_cache.permute(0, 2, 4, 1, 3).reshape(pages * tiles * TILE, heads, dim)


def tokens_of_v(v_cache: Tensor) -> Tensor:
    """V pages as tokens: [P, K, B, V] -> [P * B, K, V] (a copy)."""
    pages, heads, size, dim = v_cache.shape
    return v_cache.transpose(1, 2).reshape(pages * size, heads, dim)


def pages_from_k(k: Tensor, page_size: int) -> Tensor:
    """The inverse of ``tokens_of_k``."""
    tokens, heads, dim = k.shape
    tiled = k.reshape(tokens // page_size, page_size // TILE, TILE, heads, dim)
    return tiled.permute(0, 3, 1, 4, 2).contiguous()


def pages_from_v(v: Tensor, page_size: int) -> Tensor:
    """The inverse of ``tokens_of_v``."""
    tokens, heads, dim = v.shape
    return v.reshape(tokens // page_size, page_size, heads, dim).transpose(1, 2).contiguous()
