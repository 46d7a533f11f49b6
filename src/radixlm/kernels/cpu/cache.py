"""The layout of the paged KV cache for the C++ kernels.

K is transposed in tiles of 16 tokens, [P, K, B / 16, C, 16], so that 16 scores are one chain of
multiply-adds; V is plain, [P, K, B, V]. An int8 tile of either ends with 16 float32 scales, one a
token; csrc/cpu/kv.h draws those of int4. A latent cache has no K: it holds rows of C numbers as V
does, and their first V numbers are the value. Legend: P pages, B tokens a page, K KV heads, C
channels of K, V of V. Slot number = page * B + offset in the page.
"""

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.kernels.ops.kv import (
    DTYPES,
    INT4,
    SCALE_BYTES,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
    rotate,
    rotate_back,
    row_nbytes,
    split,
    stored_channels,
    to_kv,
    unpack_int4,
)

TILE = 16
_INT4_CODE = 6  # of csrc/common/simd.h, where bytes of weights have another


class CacheShape(Record):
    """Geometry of one layer's cache."""

    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int
    dtype: torch.dtype
    is_latent: bool = False

    def __post_init__(self) -> None:
        if self.page_size % TILE or self.page_size <= 0:
            raise ValueError(f"page_size must be a multiple of {TILE}, got {self.page_size}")
        if self.dtype not in DTYPES:
            raise TypeError(f"a cache of {self.dtype} has no kernel")

    @property
    def has_scales(self) -> bool:
        """Whether every row has scales."""
        return self.dtype in (torch.int8, INT4)

    @property
    def code(self) -> int:
        """The extension's number of the dtype."""
        return _INT4_CODE if self.dtype == INT4 else dtype_code(self.dtype, "cache")

    def k_shape(self, num_pages: int) -> tuple[int, ...]:
        """[P, K, B / 16, C, 16]; the scales of int8 as four more channels; int4: as V; latent:
        nothing."""
        if self.is_latent:
            return (0,)
        if self.dtype == INT4:
            return (*self.v_shape(num_pages)[:3], TILE * row_nbytes(self.k_dim, INT4))
        channels = self.k_dim + SCALE_BYTES * self.has_scales
        return (num_pages, self.kv_heads, self.page_size // TILE, channels, TILE)

    def v_shape(self, num_pages: int) -> tuple[int, ...]:
        """[P, K, B, V], or with scales the bytes of tiles [P, K, B / 16, bytes]; latent: C for
        V."""
        channels = self.k_dim if self.is_latent else self.v_dim
        if self.has_scales:
            tiles = self.page_size // TILE
            return (num_pages, self.kv_heads, tiles, TILE * row_nbytes(channels, self.dtype))
        return (num_pages, self.kv_heads, self.page_size, channels)

    def allocate(self, num_pages: int) -> tuple[Tensor, Tensor]:
        """Fresh (K, V). Pages are never read before they are written, so no zeroing."""
        return (
            torch.empty(self.k_shape(num_pages), dtype=self.dtype),
            torch.empty(self.v_shape(num_pages), dtype=self.dtype),
        )

    def fields(self, k_cache: Tensor, v_cache: Tensor) -> tuple[int, ...]:
        """The extension's description of the caches, after a check of the tensors."""
        for name, cache, shape in (
            ("k_cache", k_cache, self.k_shape(k_cache.shape[0])),
            ("v_cache", v_cache, self.v_shape(v_cache.shape[0])),
        ):
            if tuple(cache.shape) != shape or cache.dtype != self.dtype:
                raise ValueError(f"{name}: expected {shape} {self.dtype}, got {cache.shape}")
            if not cache.is_contiguous():
                raise ValueError(f"{name}: must be contiguous")
        return (
            k_cache.data_ptr(), v_cache.data_ptr(), self.code,
            self.kv_heads, self.k_dim, self.v_dim, self.page_size,
        )  # fmt: skip

    def tokens(self, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Pages as tokens, copied: K [P * B, K, C], V [P * B, K, V]; float32 where there are
        scales, else the cache's dtype."""
        if not self.has_scales:
            v = tokens_of_v(v_pages)
            if self.is_latent:
                return v, v[..., : self.v_dim]
            return tokens_of_k(k_pages), v
        if self.dtype == INT4:
            v = int4_rows(v_pages, self.k_dim if self.is_latent else self.v_dim, is_key=False)
        else:
            v = dequantize_int8(*self._rows(v_pages))
        if self.is_latent:
            return v, v[..., : self.v_dim]
        if self.dtype == INT4:
            return rotate_back(int4_rows(k_pages, self.k_dim, is_key=True)), v
        k, scales = k_pages.split_with_sizes((self.k_dim, SCALE_BYTES), 3)
        k_scale = scales.flatten(3).contiguous().view(torch.float32)
        return dequantize_int8(tokens_of_k(k), _tokens_of_scales(k_scale)), v

    def pages(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """The inverse of ``tokens``; rounds what the dtype cannot hold. Latent: v is not read."""
        rows = k if self.is_latent else v
        assert rows is not None, "this cache stores V, but v is None"
        if not self.has_scales:
            k_pages = torch.empty(0, dtype=self.dtype)
            if not self.is_latent:
                k_pages = pages_from_k(to_kv(k, self.dtype), self.page_size)
            return k_pages, pages_from_v(to_kv(rows, self.dtype), self.page_size)
        if self.dtype == INT4:
            return self._int4_pages(k, rows)
        q, scale = quantize_int8(rows)
        tiles = pages_from_v(q, self.page_size)
        tiles = tiles.view(*tiles.shape[:2], self.page_size // TILE, -1)
        v_pages = torch.cat((tiles, _pages_of_scales(scale, self.page_size)), 3)
        if self.is_latent:
            return torch.empty(0, dtype=self.dtype), v_pages
        q, scale = quantize_int8(k)
        scales = _pages_of_scales(scale, self.page_size)
        scales = scales.view(*scales.shape[:3], SCALE_BYTES, TILE)
        return torch.cat((pages_from_k(q, self.page_size), scales), 3), v_pages

    def _rows(self, v_pages: Tensor) -> tuple[Tensor, Tensor]:
        """int8 rows [P * B, K, V] and their scales [P * B, K]."""
        channels = self.k_dim if self.is_latent else self.v_dim
        tiles, scales = v_pages.split_with_sizes((TILE * channels, TILE * SCALE_BYTES), 3)
        rows = tokens_of_v(tiles.reshape(*tiles.shape[:2], -1, channels))
        return rows, _tokens_of_scales(scales.contiguous().view(torch.float32))

    def _int4_pages(self, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        v_pages = int4_tiles(rows, self.page_size, is_key=False)
        if self.is_latent:
            return torch.empty(0, dtype=INT4), v_pages
        return int4_tiles(rotate(k), self.page_size, is_key=True), v_pages


def shape_of(k_cache: Tensor, k_dim: int, v_dim: int) -> CacheShape:
    """The geometry of a pair of cache tensors that is not latent, by that of K."""
    return CacheShape(k_cache.shape[1], k_dim, v_dim, k_cache.shape[2] * TILE, k_cache.dtype)


def _tokens_of_scales(scales: Tensor) -> Tensor:
    """[P, K, B / 16, 16] -> [P * B, K]"""
    return scales.permute(0, 2, 3, 1).reshape(-1, scales.shape[1])


def _pages_of_scales(scale: Tensor, page_size: int) -> Tensor:
    """float32 [P * B, K] -> bytes [P, K, B / 16, 64]"""
    tiles = scale.view(-1, page_size // TILE, TILE, scale.shape[1]).permute(0, 3, 1, 2)
    return tiles.contiguous().view(torch.int8)


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


def int4_tiles(rows: Tensor, page_size: int, *, is_key: bool) -> Tensor:
    """Rows [P * B, K, C] as tiles of an int4 cache, bytes [P, K, B / 16, bytes]."""
    packed, scale = quantize_int4(rows)
    numbers = (pages_from_k(unpack_int4(packed), page_size) + 8).to(INT4)  # [P, K, B / 16, C, 16]
    if is_key:  # 8 channels of a token in four bytes
        low, high = split(numbers, 3, (-1, 2, 4)).transpose(5, 6).unbind(4)
    else:  # 4 tokens of a channel
        low, high = split(split(numbers, 4, (4, 4)), 3, (-1, 2, 16)).transpose(5, 6).unbind(4)
    scales = pages_from_k(scale, page_size).flatten(3).view(INT4)
    return torch.cat(((low | high << 4).flatten(3), scales), 3)


def int4_rows(pages: Tensor, channels: int, *, is_key: bool) -> Tensor:
    """The inverse of ``int4_tiles``: float32 [P * B, K, channels]."""
    num_bytes = TILE * stored_channels(channels) // 2
    data, scales = pages.split_with_sizes((num_bytes, pages.shape[3] - num_bytes), 3)
    if is_key:
        halves = split(data, 3, (-1, TILE, 4)).transpose(4, 5)  # [.., C / 8, 4, 16]
        numbers = torch.stack((halves & 15, halves >> 4), 4).flatten(3, 5)
    else:
        halves = split(data, 3, (-1, 4, 16, 4)).transpose(4, 5)  # [.., G, 16, 4, 4]
        numbers = torch.stack((halves & 15, halves >> 4), 4).flatten(6, 7).flatten(3, 5)
    scale = split(scales.contiguous().view(torch.bfloat16), 3, (-1, TILE))
    q = tokens_of_k(numbers.to(torch.int8) - 8)
    return dequantize_int4(q, tokens_of_k(scale))[..., :channels]
