"""Attention of one query token to tokens that a layer has chosen, by the kernels of dense
attention: they are told of a short cache that holds no others.

Chosen tiles of K and V are read where they are, as pages of 16 tokens of one head; rows of a latent
cache are copied together. Legend as in ``cache.py``; N tokens of the sequence, G choices, each for
as many heads, U sequences of the short cache, R channels of a row behind those of a query.
"""

import torch
from torch import Tensor

from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import TILE, CacheShape, tokens_of_k
from radixlm.kernels.ops.kv import INT4, SCALE_BYTES, dequantize_int8, indexable_view, split


class ChosenAttention:
    """Of one layer with caches of ``shape``; queries have ``width`` of the channels of K."""

    def __init__(
        self, shape: CacheShape, caches: tuple[Tensor, Tensor], heads: int, width: int,
        scale: float, softcap: float, sinks_H: Tensor | None,
    ) -> None:  # fmt: skip
        self._shape, self._heads, self._width = shape, heads, width
        self._k, self._v = caches
        self._scale, self._softcap, self._sinks = scale, softcap, sinks_H

    def index(self, pages: Tensor) -> Tensor:
        """The R channels of all tokens of the pages [n]: [n * B, K, R], of no other channel a byte
        is read."""
        shape, first = self._shape, self._width
        if not shape.is_latent:
            return self._index_of_keys(pages)
        if shape.dtype != torch.int8:
            rows = indexable_view(self._v)[:, 0, :, first:][pages]
            return rows.view(shape.dtype).flatten(0, 1)[:, None]
        numbers, scales = self._int8_rows()
        tiles = _tiles_of(pages, shape.page_size // TILE)
        rows = dequantize_int8(numbers[tiles, :, first:], _floats(scales[tiles]))
        return rows.flatten(0, 1)[:, None]

    def _index_of_keys(self, pages: Tensor) -> Tensor:
        shape, first = self._shape, self._width
        k = indexable_view(self._k)
        numbers = tokens_of_k(k[:, :, :, first : shape.k_dim][pages].view(shape.dtype))
        if shape.dtype != torch.int8:
            return numbers
        scales = k[:, :, :, shape.k_dim :][pages].flatten(3).view(torch.float32)
        return dequantize_int8(numbers, scales.permute(0, 2, 3, 1).reshape(-1, shape.kv_heads))

    def run(self, q_HC: Tensor, pages: Tensor, chosen_GN: Tensor) -> Tensor:
        """float32 [H, V]; ``pages`` hold N tokens. A choice is of whole tiles, but for the last,
        unless the cache is latent, where G is 1."""
        if self._shape.is_latent:
            return self._attend_rows(q_HC, pages, chosen_GN[0].nonzero()[:, 0])
        shape, (choices, count) = self._shape, chosen_GN.shape
        num, per_page = max(choices, shape.kv_heads), shape.page_size // TILE
        short = CacheShape(1, shape.k_dim, shape.v_dim, TILE, shape.dtype)
        of_unit = torch.arange(num)
        tiles_UT = chosen_GN[of_unit * choices // num, ::TILE]
        kept_U = tiles_UT.sum(1)
        # the chosen tiles first, in order
        order = torch.sort(tiles_UT.byte(), dim=1, descending=True, stable=True)[1]
        order = order[:, : int(kept_U.max())]
        head_U1 = (of_unit * shape.kv_heads // num)[:, None]
        table = pages[order // per_page] * shape.kv_heads + head_U1
        table = (table * per_page + order % per_page).int()
        missing = -count % TILE
        kv_len = (kept_U * TILE - tiles_UT[:, -1] * missing).int()
        q = torch.zeros(num, self._heads // num, shape.k_dim)
        q[..., : self._width] = q_HC.view(num, -1, self._width)
        caches = self._k.view(short.k_shape(-1)), self._v.view(short.v_shape(-1))
        return self._attend(q, short, caches, table, kv_len)

    def _attend_rows(self, q_HC: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
        """The tokens' rows are copied into a cache of their own."""
        shape, width, count = self._shape, self._width, len(tokens)
        short = CacheShape(1, width, shape.v_dim, TILE, shape.dtype, is_latent=True)
        num_tiles = -(-count // TILE)
        slots = pages[tokens // shape.page_size] * shape.page_size + tokens % shape.page_size
        k_cache, v_cache = short.allocate(num_tiles)
        if shape.dtype == torch.int8:
            numbers, scales = self._int8_rows()
            to = v_cache.view(num_tiles, -1)
            at = torch.arange(count)
            rows = to[:, : TILE * width].view(num_tiles, TILE, width)
            rows[at // TILE, at % TILE] = numbers[slots // TILE, slots % TILE, :width]
            ends = split(to[:, TILE * width :], 1, (TILE, SCALE_BYTES))
            ends[at // TILE, at % TILE] = scales[slots // TILE, slots % TILE]
        else:
            rows = indexable_view(self._v).view(-1, shape.k_dim)[:, :width]
            indexable_view(v_cache).view(-1, width)[:count] = rows[slots]
        table = torch.arange(num_tiles, dtype=torch.int32)[None]
        kv_len = torch.tensor([count], dtype=torch.int32)
        return self._attend(q_HC.float()[None], short, (k_cache, v_cache), table, kv_len)

    def _attend(
        self, q_UHC: Tensor, short: CacheShape, caches: tuple[Tensor, Tensor], table_UP: Tensor,
        kv_len_U: Tensor,
    ) -> Tensor:  # fmt: skip
        num, heads, _ = q_UHC.shape
        attention = PagedAttention(
            heads, short, self._scale, softcap=self._softcap, sinks_H=self._sinks
        )
        starts = torch.arange(num + 1, dtype=torch.int32)
        return attention.run(q_UHC, *caches, table_UP, starts, kv_len_U).flatten(0, 1)

    def _int8_rows(self) -> tuple[Tensor, Tensor]:
        """Of all tiles of a latent cache: int8 [P * B / 16, 16, C] and the bytes of the scales."""
        tiles, end = self._v.flatten(0, 2), TILE * self._shape.k_dim
        scales = split(tiles[:, end:], 1, (TILE, SCALE_BYTES))
        return split(tiles[:, :end], 1, (TILE, -1)), scales


def can_read(shape: CacheShape, heads: int, runs: tuple[int, int], has_sinks: bool) -> bool:
    """Whether ``ChosenAttention`` takes so many choices of runs of so many tokens."""
    choices, size = runs
    if shape.dtype == INT4:
        return False
    if shape.is_latent:
        return choices == 1
    parts = max(choices, shape.kv_heads)
    fits = not (parts % choices or parts % shape.kv_heads or heads % parts)
    return size % TILE == 0 and fits and (parts == 1 or not has_sinks)


def _tiles_of(pages: Tensor, per_page: int) -> Tensor:
    return (pages[:, None] * per_page + torch.arange(per_page)).flatten()


def _floats(scales: Tensor) -> Tensor:
    """Bytes [n, 16, 4] as float32 [n, 16]."""
    return scales.contiguous().view(torch.float32)[..., 0]
