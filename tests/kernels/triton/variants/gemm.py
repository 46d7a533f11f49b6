"""The variants of ``kernels/triton/gemm.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.kernels.triton.compiler import NEWEST, POINTERS, Variant

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm import _NARROW_OUT, Tile, _fit
from radixlm.kernels.triton.gemm_tile import gemm_kernel

_DATA = {
    kinds.INT8: "*i8", kinds.W8A8: "*i8", kinds.INT4: "*u8", kinds.FP8: "*fp8e4nv",
    kinds.FP8_BLOCK: "*fp8e4nv", kinds.FP8_WIDE: "*u8", kinds.FP8_BLOCK_WIDE: "*u8",
    kinds.INT4_SHIFTED: "*u8",
}  # fmt: skip
_NAMES = {
    kinds.PLAIN: "plain", kinds.INT8: "int8", kinds.W8A8: "w8a8", kinds.INT4: "int4",
    kinds.FP8: "fp8", kinds.FP8_BLOCK: "fp8block", kinds.FP8_WIDE: "fp8wide",
    kinds.FP8_BLOCK_WIDE: "fp8blockwide", kinds.INT4_SHIFTED: "int4shifted",
}  # fmt: skip


_ONLY_OLD = (kinds.FP8_WIDE, kinds.FP8_BLOCK_WIDE)
_ONLY_NEW = (kinds.FP8, kinds.FP8_BLOCK)


def archs_of(kind: int) -> tuple[int, int]:
    """The oldest and the newest GPU on which a kind of weights is chosen."""
    return 89 if kind in _ONLY_NEW else 80, 88 if kind in _ONLY_OLD else NEWEST


def variants() -> tuple[Variant, ...]:
    """Every kind, dtype and tile, gated and not; nothing else is compiled in."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for kind, name in _NAMES.items():
        for dtype, pointer in POINTERS.items():
            if dtype == torch.float32 and kind != kinds.PLAIN:
                continue
            label = f"{name}-{pointer}"
            tiles, old = _tiles(kind, dtype, False), _tiles(kind, dtype, True)
            for tile in sorted(tiles | old, key=lambda t: (t.m, t.n, t.k, t.warps)):
                archs = archs_of(kind)
                if tile not in old:
                    archs = (max(90, archs[0]), archs[1])
                elif tile not in tiles:
                    archs = (archs[0], min(89, archs[1]))
                for is_gated in (False, True):
                    own = f"{label}-old" if tile not in tiles else label
                    yield _variant(own, kind, pointer, tile, is_gated, archs)


def _tiles(kind: int, dtype: torch.dtype, is_old: bool) -> set[Tile]:
    return {
        _fit(kind, group, num_out, rows, dtype, is_old)
        for group in ((32, 128) if kind in kinds.NIBBLES else (0,))
        for num_out in (32 * 132, _NARROW_OUT, _NARROW_OUT + 1)
        for rows in (1, 17, 33, 65)
    }


def _variant(
    label: str, kind: int, pointer: str, tile: Tile, is_gated: bool, archs: tuple[int, int]
) -> Variant:
    is_wide = pointer == "*fp32" or kind not in (kinds.PLAIN, *kinds.QUANTIZED_X)
    min_arch, max_arch = archs
    return Variant(
        f"{label}-{tile.m}x{tile.n}x{tile.k}{'-gated' * is_gated}",
        gemm_kernel,
        signature(kind, pointer),
        {
            "KIND": kind,
            "GATED": is_gated,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": tile.rows_in_turn,
        },
        tile.warps,
        tile.stages,
        wgmma=tile.m >= 64 and not is_wide,
        min_arch=min_arch,
        max_arch=max_arch,
    )


def signature(kind: int, pointer: str) -> dict[str, str]:
    """Types of the kernel's parameters; ``pointer`` is that of activations outside."""
    inner = {kinds.W8A8: "*i8", kinds.FP8: "*fp8e4nv", kinds.FP8_BLOCK: "*fp8e4nv"}
    flags = ("group", "by_expert", "top_k", "has_bias", "is_weighted", "is_paired")
    return {
        "x_ptr": inner.get(kind, pointer),
        "w_ptr": _DATA.get(kind, pointer),
        "out_ptr": pointer,
        **dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "bias_ptr", "row_weight_ptr"), "*fp32"),
        "slots_ptr": "*i32",
        "owners_ptr": "*i32:1",
        **dict.fromkeys(("num_rows", "num_blocks", *flags), "i32"),
        **dict.fromkeys(("num_out", "num_in", "x_stride"), "i32:16"),
        **dict.fromkeys(("limit", "alpha", "shift"), "fp32"),
    }
