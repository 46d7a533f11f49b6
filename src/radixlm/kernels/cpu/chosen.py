"""Attention of query tokens to tokens that a layer has chosen, by the kernels of dense attention:
they are told of a short cache that holds no others. The numbers of a query are those of its own
tokens in this order, whatever other queries there are.

Chosen tiles of K and V are read where they are, as pages of 16 tokens of one head; rows of a latent
cache are copied together. Legend as in ``cache.py``; N tokens of the sequence, G choices, each for
as many heads, U sequences of the short cache, R channels of a row behind those of a query.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.cpu.cache import TILE, CacheShape, tokens_of_k
from radixlm.kernels.ops.kv import INT4, SCALE_BYTES, dequantize_int8, indexable_view, split

MAX_COPIED = 1 << 24  # numbers of a latent cache that are copied at once


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

    def run(self, q_QHC: Tensor, pages: Tensor, chosen_GQN: Tensor) -> Tensor:
        """float32 [Q, H, V] of the last Q of the N tokens of ``pages``. A choice is of whole tiles,
        but for a query's own, unless the cache is latent, where G is 1."""
        num, count = chosen_GQN.shape[1:]
        positions_Q = torch.arange(count - num, count)
        causal_QN = torch.arange(count) <= positions_Q[:, None]
        chosen_GQN = chosen_GQN & causal_QN
        # the first queries may have chosen all: that is ordinary attention
        reads_all_Q = (chosen_GQN | ~causal_QN).all(-1).all(0)
        begin = int(reads_all_Q.int().cumprod(0).sum())
        parts = [self._attend_all(q_QHC[:begin], pages, count - num + begin)] if begin else []
        step = max(1, MAX_COPIED // (int(chosen_GQN.sum(-1).max()) * self._shape.k_dim))
        for first in range(begin, num, step):
            rows = slice(first, first + step)
            q, chosen = q_QHC[rows], chosen_GQN[:, rows]
            if self._shape.is_latent:
                parts.append(self._attend_rows(q, pages, chosen[0]))
            else:
                parts.append(self._attend_tiles(q, pages, chosen, positions_Q[rows]))
        return torch.cat(parts)

    def _attend_all(self, q_QHC: Tensor, pages: Tensor, count: int) -> Tensor:
        """Of queries that read all of ``count`` tokens up to their own; they are the last."""
        q = self._padded(q_QHC, self._heads)
        table, lengths = pages.int()[None], torch.tensor([count], dtype=torch.int32)
        starts = torch.tensor([0, len(q)], dtype=torch.int32)
        return self._kernel(self._heads, self._shape).run(
            q, self._k, self._v, table, starts, lengths
        )

    def _attend_tiles(
        self, q_QHC: Tensor, pages: Tensor, chosen_GQN: Tensor, positions_Q: Tensor
    ) -> Tensor:
        """The chosen tiles are a short cache's pages."""
        shape, (choices, num, _) = self._shape, chosen_GQN.shape
        units, per_page = max(choices, shape.kv_heads), shape.page_size // TILE
        short = CacheShape(1, shape.k_dim, shape.v_dim, TILE, shape.dtype)
        of_unit = torch.arange(units)
        tiles_UT = chosen_GQN[of_unit * choices // units, :, ::TILE].transpose(0, 1).flatten(0, 1)
        kept_U = tiles_UT.sum(1)
        # the chosen tiles first, in order
        order = torch.sort(tiles_UT.byte(), dim=1, descending=True, stable=True)[1]
        order = order[:, : int(kept_U.max())]
        head_U1 = (of_unit * shape.kv_heads // units).repeat(num)[:, None]
        table = pages[order // per_page] * shape.kv_heads + head_U1
        table = (table * per_page + order % per_page).int()
        own_U = positions_Q.repeat_interleave(units)
        reads_own_U = tiles_UT.gather(1, own_U[:, None] // TILE)[:, 0]
        kv_len = (kept_U * TILE - reads_own_U * (TILE - 1 - own_U % TILE)).int()
        q = self._padded(q_QHC, self._heads // units)
        caches = self._k.view(short.k_shape(-1)), self._v.view(short.v_shape(-1))
        return self._attend(q, short, caches, table, kv_len).view(num, self._heads, -1)

    def _attend_rows(self, q_QHC: Tensor, pages: Tensor, chosen_QN: Tensor) -> Tensor:
        """The tokens' rows are copied into a cache of their own, from a tile's begin on for each
        query."""
        shape, width = self._shape, self._width
        query, tokens = chosen_QN.nonzero(as_tuple=True)
        counts_Q = chosen_QN.sum(1)
        tiles_Q = -(-counts_Q // TILE)
        first_Q, num_tiles = tiles_Q.cumsum(0) - tiles_Q, int(tiles_Q.sum())
        at = torch.arange(len(tokens)) + (first_Q * TILE - counts_Q.cumsum(0) + counts_Q)[query]
        short = CacheShape(1, width, shape.v_dim, TILE, shape.dtype, is_latent=True)
        slots = pages[tokens // shape.page_size] * shape.page_size + tokens % shape.page_size
        k_cache, v_cache = short.allocate(num_tiles)
        if shape.dtype == torch.int8:
            numbers, scales = self._int8_rows()
            to = v_cache.view(num_tiles, -1)
            rows = to[:, : TILE * width].view(num_tiles, TILE, width)
            rows[at // TILE, at % TILE] = numbers[slots // TILE, slots % TILE, :width]
            ends = split(to[:, TILE * width :], 1, (TILE, SCALE_BYTES))
            ends[at // TILE, at % TILE] = scales[slots // TILE, slots % TILE]
        else:
            rows = indexable_view(self._v).view(-1, shape.k_dim)[:, :width]
            indexable_view(v_cache).view(-1, width)[at] = rows[slots]
        table = first_Q[:, None] + torch.arange(int(tiles_Q.max()))
        table = table.clamp(max=num_tiles - 1).int()
        q = q_QHC.float().contiguous()
        return self._attend(q, short, (k_cache, v_cache), table, counts_Q.int())

    def _padded(self, q_QHC: Tensor, heads: int) -> Tensor:
        """Queries of so many heads each, with zeros for the channels behind theirs."""
        rows = q_QHC.reshape(-1, heads, self._width).float()
        return F.pad(rows, (0, self._shape.k_dim - self._width)).contiguous()

    def _kernel(self, heads: int, shape: CacheShape) -> PagedAttention:
        return PagedAttention(heads, shape, self._scale, softcap=self._softcap, sinks_H=self._sinks)

    def _attend(
        self, q_UHC: Tensor, short: CacheShape, caches: tuple[Tensor, Tensor], table_UP: Tensor,
        kv_len_U: Tensor,
    ) -> Tensor:  # fmt: skip
        starts = torch.arange(len(q_UHC) + 1, dtype=torch.int32)
        kernel = self._kernel(q_UHC.shape[1], short)
        return kernel.run(q_UHC, *caches, table_UP, starts, kv_len_U)

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
