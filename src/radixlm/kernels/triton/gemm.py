"""Packed weights, their products by ``gemm_tile``, and the tile of each shape.

Legend: M rows, N outputs, K inputs, E experts, S slots (token, choice).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.activation import SWISH, gated_pairs
from radixlm.kernels.triton.gemm_tile import gemm_kernel
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import interpreting, nothing
from radixlm.kernels.triton.moe_align import Aligned


class Packed(Record):
    """Weights of E experts (a dense layer: 1) as ``gemm_tile`` describes them. With ``act`` the
    rows of ``data``, ``scale`` and ``bias`` are interleaved [gate; up]. ``bias``: float32 [E, N].
    """

    kind: int
    data: Tensor
    scale: Tensor | None
    bias: Tensor | None
    num_out: int
    num_in: int
    act: str = ""
    group: int = 0  # inputs that share a scale (4 bits)

    @property
    def width(self) -> int:
        """Columns of a product."""
        return self.num_out // 2 if self.act else self.num_out

    @property
    def is_swish(self) -> bool:
        """Whether the product kernel applies the activation."""
        return self.act in SWISH


class Tile(Record):
    """What a program computes. ``rows_in_turn``: consecutive row blocks that share weights in the
    L2 cache."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4
    rows_in_turn: int = 8


# (max rows of an expert, or in one place outputs, tile); the last of rows has no bound
Table = tuple[tuple[int, Tile], ...]
_ANY = 1 << 30

_WIDE: Table = (
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128, stages=3)),
    (64, Tile(64, 128, 64)),
    (_ANY, Tile(128, 128, 64, warps=8)),
)
_BYTES: Table = (
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128)),
    (64, Tile(64, 128, 128, stages=3)),
    (_ANY, Tile(128, 128, 128, warps=8, stages=3)),
)
_BYTES_OLD: Table = (  # before sm_90: sums and operands share the registers
    *_BYTES[:2],
    (_ANY, Tile(64, 128, 128, warps=8, stages=3)),
)
_BLOCKS: Table = (  # the sum of a block stands beside the whole sum: fewer rows fit
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128)),
    (_ANY, Tile(64, 128, 128, stages=3)),
)
_DEQUANTIZED: Table = (  # weights are dequantized in registers
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128, stages=3)),
    (_ANY, Tile(64, 64, 64, stages=3)),
)
_WIDENED_OLD: Table = (_DEQUANTIZED[0], (_ANY, Tile(32, 64, 128, stages=3)))
_TIGHT_OLD = (
    (kinds.INT4, torch.float16),
    *((kinds.INT4_SHIFTED, dtype) for dtype in (torch.float16, torch.bfloat16)),
)
_FLOAT32: Table = ((16, Tile(16, 64, 32, stages=2)), (_ANY, Tile(32, 32, 32, stages=2)))
TABLES: Mapping[int, Table] = {
    kinds.PLAIN: _WIDE,
    kinds.INT8: _DEQUANTIZED,
    kinds.W8A8: _BYTES,
    kinds.INT4: _DEQUANTIZED,
    kinds.FP8: _BYTES,
    kinds.FP8_BLOCK: _BLOCKS,
    kinds.FP8_WIDE: _DEQUANTIZED,
    kinds.FP8_BLOCK_WIDE: _DEQUANTIZED,
    kinds.INT4_SHIFTED: _DEQUANTIZED,
}
INVARIANT_ROWS = 64  # rows of the tile that all batches share, if results may not depend on them
_NARROW_OUT = 64 * 132  # outputs that leave some of 132 SMs idle with tiles of 64
# fp8 with few outputs, measured on an H100: a program alone on its SM needs many bytes in flight
_FP8_NARROW: Table = (
    (32 * 132, Tile(16, 32, 256, stages=6, rows_in_turn=1)),
    (_NARROW_OUT, Tile(16, 64, 256, rows_in_turn=1)),
)


def int4_chunk(group: int) -> int:
    """Inputs whose halves are the two nibbles of a byte: a half has one scale."""
    return 64 if group == 32 else 128


QUANTIZED_X = ("w8a8", "fp8", "fp8-128")  # formats whose x is rounded too


def fits(fmt: str, dtype: torch.dtype) -> bool:
    """Whether x in ``dtype`` can be multiplied with weights in ``fmt``: quantized weights go with
    16 bit activations."""
    return interpreting() or not fmt or dtype != torch.float32


def choose_tile(packed: Packed, rows: int, dtype: torch.dtype, num_experts: int = 1) -> Tile:
    """The tile for so many rows an expert of x in ``dtype``, ``num_experts`` at work."""
    outputs = packed.num_out * num_experts
    return _fit(packed.kind, packed.group, outputs, rows, dtype, _is_old(packed))


def _is_old(packed: Packed) -> bool:
    """Whether the GPU is older than sm_90, for kinds whose tiles depend on it."""
    if packed.kind not in (kinds.W8A8, *kinds.NIBBLES) or not packed.data.is_cuda:
        return False
    return torch.cuda.get_device_capability(packed.data.device) < (9, 0)


def _fit(
    kind: int, group: int, num_out: int, rows: int, dtype: torch.dtype, is_old: bool = False
) -> Tile:
    table = _FLOAT32 if dtype == torch.float32 and kind not in kinds.QUANTIZED_X else TABLES[kind]
    if is_old and kind == kinds.W8A8:
        table = _BYTES_OLD
    elif is_old and group != 32 and (kind, dtype) in _TIGHT_OLD:
        table = _WIDENED_OLD
    tile = next(tile for max_rows, tile in table if rows <= max_rows)
    k, n = tile.k, tile.n
    warps = tile.warps
    if kind in kinds.NIBBLES:
        k = int4_chunk(group)
        if tile.m == 16 and not (k == 128 and dtype == torch.float16):
            warps = 8  # the other number spills a register or two
        elif tile.m == 32 and kind == kinds.INT4_SHIFTED:
            warps = 8
    elif kind == kinds.FP8_BLOCK_WIDE:
        k = min(k, kinds.FP8_GROUP)
    if tile.m == 16 and num_out <= _NARROW_OUT:
        if kind == kinds.FP8:
            return next(tile for max_out, tile in _FP8_NARROW if num_out <= max_out)
        n = 32
    return Tile(tile.m, n, k, warps, tile.stages, tile.rows_in_turn)


def product(
    x_MK: Tensor,
    packed: Packed,
    x_scale: Tensor | None,
    dtype: torch.dtype,
    tile_rows: int | None = None,
) -> Tensor:
    """[M, width] of dense weights. ``x_scale`` belongs to a quantized x; ``tile_rows``: M that the
    tile is chosen for, if not that of x."""
    rows = x_MK.shape[0]
    tile = choose_tile(packed, tile_rows or rows, x_MK.dtype)
    out = torch.empty(rows, packed.width, dtype=dtype, device=x_MK.device)
    if rows:
        _launch(x_MK, packed, x_scale, out, tile, rows, cdiv(rows, tile.m))
    return out


def product_by_expert(
    x: Tensor,
    packed: Packed,
    aligned: Aligned,
    tile: Tile,
    out: Tensor,
    *,
    top_k: int,
    x_scale: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Row s of ``out`` [S, width]: row s // top_k of x through the expert of slot s, times
    ``row_weights[s]``."""
    assert tile.m == aligned.block
    assert row_weights is None or not packed.act
    _launch(
        x, packed, x_scale, out, tile, out.shape[0], aligned.max_blocks, aligned, top_k, row_weights
    )
    return out


def _launch(
    x: Tensor,
    packed: Packed,
    x_scale: Tensor | None,
    out: Tensor,
    tile: Tile,
    num_rows: int,
    num_blocks: int,
    aligned: Aligned | None = None,
    top_k: int = 1,
    row_weights: Tensor | None = None,
) -> None:
    is_gated = packed.is_swish
    made = out  # what the kernel writes
    if packed.act and not is_gated:
        made = out.new_empty(num_rows, packed.num_out)
    floats, integers = nothing(torch.float32, x.device), nothing(torch.int32, x.device)
    grid = (num_blocks * cdiv(packed.num_out, tile.n),)
    launch(
        gemm_kernel, grid,
        (x, floats if x_scale is None else x_scale, packed.data,
         floats if packed.scale is None else packed.scale,
         floats if packed.bias is None else packed.bias, made,
         integers if aligned is None else aligned.slots,
         integers if aligned is None else aligned.owners,
         floats if row_weights is None else row_weights),
        (num_rows, num_blocks, packed.num_out, packed.num_in, x.stride(0),
         packed.group, int(aligned is not None), top_k, int(packed.bias is not None),
         int(row_weights is not None), int(bool(packed.act)),
         *SWISH.get(packed.act, (0.0, 0.0, 0.0))),
        KIND=packed.kind, GATED=is_gated,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.rows_in_turn,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if made is not out:
        gated_pairs(made, packed.act, out)
