"""Packed weights, and the products that ``gemm_tile`` makes of them: which tile runs which shape.

Legend: M rows, N outputs, K inputs, E experts, S slots (token, choice).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm_tile import ACTS, gemm_kernel
from radixlm.kernels.triton.mode import interpreting
from radixlm.kernels.triton.moe_align import Aligned
from radixlm.kernels.triton.variant import POINTERS, Variant


@dataclass(frozen=True, slots=True)
class Packed:
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


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes. ``rows_in_turn``: blocks of rows that share weights in the cache."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4
    rows_in_turn: int = 8


Table = tuple[tuple[int, Tile], ...]  # (most rows an expert, tile); the last one has no bound
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
_BLOCKS: Table = (  # the sum of a block stands beside the whole sum: fewer rows fit
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128)),
    (_ANY, Tile(64, 128, 128, stages=3)),
)
_WIDENED: Table = (  # weights are widened in registers
    (16, Tile(16, 64, 128, rows_in_turn=1)),
    (32, Tile(32, 64, 128, stages=3)),
    (_ANY, Tile(64, 64, 64, stages=3)),
)
_FLOAT32: Table = ((16, Tile(16, 64, 32, stages=2)), (_ANY, Tile(32, 32, 32, stages=2)))
TABLES: Mapping[int, Table] = {
    kinds.PLAIN: _WIDE,
    kinds.INT8: _WIDENED,
    kinds.W8A8: _BYTES,
    kinds.INT4: _WIDENED,
    kinds.FP8: _BYTES,
    kinds.FP8_BLOCK: _BLOCKS,
    kinds.FP8_WIDE: _WIDENED,
    kinds.FP8_BLOCK_WIDE: _WIDENED,
}
_NARROW_OUT = 64 * 132  # outputs that leave some of 132 SMs idle with tiles of 64


def int4_chunk(group: int) -> int:
    """Inputs whose halves are the two nibbles of a byte: a half has one scale."""
    return 64 if group == 32 else 128


def fits(kind: int, dtype: torch.dtype) -> bool:
    """Whether x in ``dtype`` can be multiplied: 4 bits with float32 overflow the registers."""
    return interpreting() or kind != kinds.INT4 or dtype != torch.float32


def choose_tile(packed: Packed, rows: int, dtype: torch.dtype, num_experts: int = 1) -> Tile:
    """The tile for so many rows an expert of x in ``dtype``, ``num_experts`` at work."""
    outputs = packed.num_out * num_experts
    return _fit(packed.kind, packed.group, outputs, rows, dtype == torch.float32)


def _fit(kind: int, group: int, num_out: int, rows: int, is_float32: bool) -> Tile:
    table = _FLOAT32 if is_float32 and kind not in kinds.QUANTISED_X else TABLES[kind]
    tile = next(tile for most, tile in table if rows <= most)
    k, n = tile.k, tile.n
    if kind == kinds.INT4:
        k = int4_chunk(group)
    elif kind == kinds.FP8_BLOCK_WIDE:
        k = min(k, kinds.FP8_GROUP)
    if tile.m == 16 and num_out <= _NARROW_OUT:
        n = 32
    return Tile(tile.m, n, k, tile.warps, tile.stages, tile.rows_in_turn)


def product(x_MK: Tensor, packed: Packed, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[M, width] of dense weights. ``x_scale`` belongs to a quantised x."""
    rows = x_MK.shape[0]
    tile = choose_tile(packed, rows, x_MK.dtype)
    out = torch.empty(rows, packed.width, dtype=dtype, device=x_MK.device)
    if rows:
        _launch(x_MK, packed, x_scale, out, tile, rows, triton.cdiv(rows, tile.m))
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
    none = out  # of a pointer that the kernel does not read
    grid = (num_blocks * triton.cdiv(packed.num_out, tile.n),)
    gemm_kernel[grid](
        x, none if x_scale is None else x_scale, packed.data,
        none if packed.scale is None else packed.scale,
        none if packed.bias is None else packed.bias, out,
        none if aligned is None else aligned.slots, none if aligned is None else aligned.owners,
        none if row_weights is None else row_weights,
        num_rows, num_blocks, packed.num_out, packed.num_in, x.stride(0),
        KIND=packed.kind, GROUP=packed.group, BY_EXPERT=aligned is not None, TOP_K=top_k,
        HAS_BIAS=packed.bias is not None, ACT=ACTS[packed.act] if packed.act else 0,
        IS_WEIGHTED=row_weights is not None, EVEN_K=packed.num_in % tile.k == 0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.rows_in_turn,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


_DATA = {
    kinds.INT8: "*i8", kinds.W8A8: "*i8", kinds.INT4: "*u8", kinds.FP8: "*fp8e4nv",
    kinds.FP8_BLOCK: "*fp8e4nv", kinds.FP8_WIDE: "*u8", kinds.FP8_BLOCK_WIDE: "*u8",
}  # fmt: skip
_NAMES = {
    kinds.PLAIN: "plain", kinds.INT8: "int8", kinds.W8A8: "w8a8", kinds.INT4: "int4",
    kinds.FP8: "fp8", kinds.FP8_BLOCK: "fp8block", kinds.FP8_WIDE: "fp8wide",
    kinds.FP8_BLOCK_WIDE: "fp8blockwide",
}  # fmt: skip


def variants() -> tuple[Variant, ...]:
    """Every kind and tile: gated by expert, weighted by expert, and dense; inputs that fill the
    tiles and that do not."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for kind, name in _NAMES.items():
        for dtype, pointer in POINTERS.items():
            is_float32 = dtype == torch.float32
            if is_float32 and kind in (*kinds.QUANTISED_X, kinds.INT4):
                continue
            for group in (32, 64, 128) if kind == kinds.INT4 else (0,):
                tiles = {
                    _fit(kind, group, num_out, rows, is_float32)
                    for num_out in (4096, 32768)
                    for rows in (1, 17, 33, 65)
                }
                label = f"{name}{group or ''}-{pointer}"
                for tile in sorted(tiles, key=lambda t: (t.m, t.n)):
                    yield from _uses(label, kind, group, pointer, tile)


def _uses(label: str, kind: int, group: int, pointer: str, tile: Tile) -> Iterator[Variant]:
    for use, constants in {
        "up": {"BY_EXPERT": True, "TOP_K": 8, "ACT": 1, "IS_WEIGHTED": False, "EVEN_K": True},
        "down": {"BY_EXPERT": True, "TOP_K": 1, "ACT": 0, "IS_WEIGHTED": True, "EVEN_K": False},
        "dense": {"BY_EXPERT": False, "TOP_K": 1, "ACT": 0, "IS_WEIGHTED": False, "EVEN_K": True},
    }.items():
        rest: dict[str, Any] = {
            "KIND": kind,
            "GROUP": group,
            "HAS_BIAS": use == "down",
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": tile.rows_in_turn,
        }
        is_wide = pointer == "*fp32" or kind not in (kinds.PLAIN, *kinds.QUANTISED_X)
        yield Variant(
            f"{use}-{label}-{tile.m}x{tile.n}x{tile.k}",
            gemm_kernel,
            signature(kind, pointer),
            constants | rest,
            tile.warps,
            tile.stages,
            wgmma=tile.m >= 64 and not is_wide,
            min_arch=89 if kind in (kinds.FP8, kinds.FP8_BLOCK) else 80,
        )


def signature(kind: int, pointer: str) -> dict[str, str]:
    """Types of the kernel's parameters; ``pointer`` is that of activations outside."""
    inner = {kinds.W8A8: "*i8", kinds.FP8: "*fp8e4nv", kinds.FP8_BLOCK: "*fp8e4nv"}
    return {
        "x_ptr": inner.get(kind, pointer),
        "w_ptr": _DATA.get(kind, pointer),
        "out_ptr": pointer,
        **dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "bias_ptr", "row_weight_ptr"), "*fp32"),
        "slots_ptr": "*i32",
        "owners_ptr": "*i32:1",
        **dict.fromkeys(("num_rows", "num_blocks"), "i32"),
        **dict.fromkeys(("num_out", "num_in", "x_stride"), "i32:16"),
    }
