"""What the C++ kernels of double sparsity keep beside a cache (csrc/cpu/heavy.h).

Rows of K in the layout of V, because chosen tokens stand apart from each other and K is transposed;
labels, int8 in tiles of 16 tokens, each with 16 float32 scales. Legend as in ``cache.py``; W heavy
channels, L layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixlm.base.record import replace
from radixlm.kernels.cpu.cache import TILE, CacheShape
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.ops.kv import SCALE_BYTES, row_nbytes


def heavy_nbytes(width: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a token of one head: its row and its label."""
    return row_nbytes(dim, dtype) + _padded(width) + SCALE_BYTES


def _padded(width: int) -> int:
    return -(-width // 2) * 2  # labels come in pairs


class HeavyCache:
    """Of all layers of a pool: ``rows`` and ``labels`` [L, P, ...]."""

    def __init__(self, shape: CacheShape, channels_LKW: Sequence[Tensor], top: int) -> None:
        self._channels, self._top = channels_LKW, top
        self._width = int(channels_LKW[0].shape[1])
        self._rows_shape = replace(shape, v_dim=shape.k_dim, is_latent=True)

    def shapes(self, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a layer's rows, of the cache's dtype, and of its labels, int8."""
        shape = self._rows_shape
        tile = TILE * (_padded(self._width) + SCALE_BYTES)
        return shape.v_shape(num_pages), (num_pages, shape.kv_heads, shape.page_size // TILE, tile)

    def bind(self, rows: Tensor, labels: Tensor) -> list[Any]:
        """The extension's description of each layer; it has their addresses only."""
        layers = zip(rows, labels, self._channels, strict=True)
        return [
            native().Heavy(*(x.data_ptr() for x in layer), self._width, self._top)
            for layer in layers
        ]
