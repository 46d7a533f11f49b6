"""The variants of ``kernels/triton/attention_run.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.kernels.triton.compiler import NEWEST, POINTERS, Variant

from radixlm.base.record import replace
from radixlm.kernels.triton import attention_paged as paged
from radixlm.kernels.triton.attention_run import Shape, Tile, _features, tiles_of
from radixlm.step.batch import AttentionSite


def variants() -> tuple[Variant, ...]:
    """Every tile for every kind of head and cache, with and without extras; groups of heads, page
    sizes and channels beside a block's make no difference to registers."""
    return tuple(_variants())


_SITE = AttentionSite(0, 0, 32, 8, 128, 128, 1.0)
_LATENT = AttentionSite(0, 0, 128, 1, 576, 512, 1.0, latent=True)
# 96: 80 and 112 too, in a block of 128
_SITES = (*(replace(_SITE, head_dim=d, v_dim=d) for d in (128, 64, 96, 192, 256)), _LATENT)
_CACHES = {"same": 0, "i8": 1, "fp8e5": 0, "fp8e4nv": 0, "u8": 2}  # to KIND; u8: e4m3 on sm_80
_HELD = {
    "i8": torch.int8, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn,
    "u8": torch.float8_e4m3fn,
}  # fmt: skip
_ARCHS = {True: (90, NEWEST), False: (80, 88)}  # by whether it is a Hopper


def _variants() -> Iterator[Variant]:
    for site in _SITES:
        for dtype in POINTERS:
            for is_hopper in (True, False):
                yield from _tables(site, dtype, is_hopper)
    blocks = {(Shape(site, tile).combine_block, site.v_dim): (site, tile)
              for site in _SITES
              for extras in (False, True)
              for tile in tiles_of(site.head_dim, torch.bfloat16, extras)}  # fmt: skip
    for dtype in POINTERS:
        for site, tile in blocks.values():
            yield _combine(site, tile, dtype)


def _tables(site: AttentionSite, dtype: torch.dtype, is_hopper: bool) -> Iterator[Variant]:
    for cache in _CACHES:
        if cache == ("u8" if is_hopper else "fp8e4nv"):
            continue
        if cache != "same" and dtype == torch.float32:
            continue  # see computed_in
        held = _HELD.get(cache, dtype)
        for is_extra in (False, True):
            for tile in tiles_of(site.head_dim, dtype, is_extra, is_hopper, held):
                yield _variant(site, tile, dtype, cache, is_extra, is_hopper)


_POINTERS = dict.fromkeys(("partial", "lse", "k_scale", "v_scale", "sinks", "slopes"), "*fp32")
_TABLES = dict.fromkeys(
    "tree query_start kv_len page_table unit_row unit_number splits split_len num_units".split(),
    "*i32:1",
)
_NUMBERS = {
    **dict.fromkeys(("q_stride", "q_head_stride"), "i32:16"),
    **dict.fromkeys(("table_stride", "tree_stride", "window", "chunk"), "i32"),
    **dict.fromkeys(("has_sinks", "has_slopes", "has_tree"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}


def _variant(
    site: AttentionSite, tile: Tile, dtype: torch.dtype, cache: str, is_extra: bool, is_hopper: bool
) -> Variant:
    shape, pointer = Shape(site, tile), POINTERS[dtype]
    held = pointer if cache == "same" else f"*{cache}"
    signature = {"q": pointer, "out": pointer, "k": held, "v": held, "positions": "*i64:1"}
    min_arch, max_arch = _ARCHS[is_hopper]
    name = f"{tile.rows}{'-extras' * is_extra}-{pointer[1:]}-{cache}-{site.head_dim}"
    return Variant(
        f"attention-{name}-sm_{min_arch}",
        paged.attention_kernel,
        signature | _POINTERS | _TABLES | _NUMBERS,
        shape.constants() | _features(shape, 16, _CACHES[cache], is_extra),
        tile.num_warps,
        tile.num_stages,
        wgmma=tile.rows >= 64 and dtype != torch.float32,
        min_arch=min_arch,
        max_arch=max_arch,
    )


def _combine(site: AttentionSite, tile: Tile, dtype: torch.dtype) -> Variant:
    shape, pointer = Shape(site, tile), POINTERS[dtype]
    block_m, block_p = shape.combine_block
    constants = shape.constants() | {"BLOCK_M": block_m, "BLOCK_P": block_p}
    pointers = {"out": pointer, "partial": "*fp32", "lse": "*fp32"}
    name = f"attention-combine-{pointer[1:]}-{block_m}x{block_p}-{site.v_dim}"
    return Variant(name, paged.combine_kernel, pointers | _TABLES, constants, 4, 3)
