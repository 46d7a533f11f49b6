"""Launches the paged attention kernel: tiles, memory between its two halves, variants.

Legend: T packed tokens, S sequences, P pages a sequence, H query heads, K KV heads, C channels of
K, V of V, L slots of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from radixlm.base.record import Record, replace
from radixlm.kernels.ops.kv import INT4, SCALED, rotated_block
from radixlm.kernels.triton import attention_paged as paged
from radixlm.kernels.triton.attention_plan import UNBOUNDED, Cut, Work
from radixlm.kernels.triton.attention_store import rotate
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import interpreting, nothing
from radixlm.step.batch import AttentionSite

MAX_DIM = 256  # of a head; latents have 576
DECODE_LEN = 64  # least tokens of a split
EXTEND_LEN = 1024


class Tile(Record):
    """Rows (query tokens x heads) and keys of a program, its warps and stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Most channels of K: tiles by the rows they hold, the last for all more. None spills. The middle
# one holds what the extras of a site need beside its sums.
_HOPPER: dict[int, tuple[Tile, ...]] = {
    128: (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(128, 64, 8, 3)),
    256: (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2), Tile(128, 32, 8, 3)),
    1024: (Tile(16, 32, 8, 3), Tile(32, 16, 8, 3), Tile(32, 32, 8, 2)),
}
_AMPERE: dict[int, tuple[Tile, ...]] = {  # 163 KiB of shared memory; q stays in registers
    128: (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(64, 64, 8, 3)),
    256: (Tile(16, 32, 4, 3), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
    1024: (Tile(16, 32, 8, 3), Tile(32, 16, 8, 3), Tile(32, 32, 8, 2)),
}
_SINGLE: dict[int, tuple[Tile, ...]] = {  # no tensor cores: products of single precision
    128: (Tile(16, 32, 8, 1),),
    192: (Tile(16, 16, 8, 1),),
    1024: (Tile(16, 16, 16, 1),),
}


def tiles_of(
    dim: int,
    dtype: torch.dtype,
    has_extras: bool = False,
    is_hopper: bool = True,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tile, ...]:
    """The tiles for heads of so many channels and q of ``dtype``, smallest first. Decoding from a
    cache of 8 bits takes more warps where that helps, because dequantizing needs registers."""
    table = _HOPPER if is_hopper else _AMPERE
    if dtype == torch.float32 and not interpreting():  # the interpreter is slow, and has no limits
        table = _SINGLE
    tiles = next(tiles for max_dim, tiles in table.items() if dim <= max_dim)
    if cache_dtype is not None and cache_dtype.itemsize == 1:
        is_wide, is_int8 = 192 < dim <= MAX_DIM, cache_dtype == torch.int8
        is_padded = is_int8 and 64 < dim < 128
        # of these Triton 3.6 gives 8 warps half the registers, and spills two
        is_tight = is_wide or (is_padded and is_hopper)
        if has_extras or not is_tight:
            tiles = (replace(tiles[0], num_warps=max(8, tiles[0].num_warps)), *tiles[1:])
        if has_extras and is_wide and cache_dtype == torch.float8_e5m2:
            tiles = (replace(tiles[0], num_stages=2), *tiles[1:])
        if has_extras and dim > MAX_DIM:
            return tiles[:1]
        if has_extras and 128 < dim <= MAX_DIM:
            tiles = (tiles[0], Tile(32, 32, 8, 2))
        elif has_extras and is_padded and not is_hopper:
            tiles = (tiles[0], Tile(64, 32, 8, 2))
        elif is_wide and is_int8:
            tiles = (tiles[0], Tile(64, 32, 8, 3) if is_hopper else Tile(32, 32, 8, 2))
    return tiles[:2] if has_extras else tiles[:1] + tiles[1:][-1:]


def computed_in(dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """The dtype of q for products with a cache: float32 q becomes bfloat16 if the cache has 8
    bits."""
    is_coarse = cache_dtype.itemsize == 1 and dtype == torch.float32 and not interpreting()
    return torch.bfloat16 if is_coarse else dtype


def has_extras(site: AttentionSite, has_tree: bool) -> bool:
    """Whether the site or the step needs more than causal attention, a window and sinks."""
    return has_tree or bool(site.softcap) or site.slopes is not None


class Cache(Record):
    """One layer's part of a pool. ``k_LKC`` and ``v_LKV`` (absent: the first channels of K)
    contiguous; ``scales`` of K and of V, where rows have them: float32 [L, K] of int8, bfloat16
    [L, K, G] of int4."""

    k_LKC: Tensor
    v_LKV: Tensor | None
    scales: tuple[Tensor, ...]
    page_size: int


class TreeAttentionMask(Record):
    """Which of the step's own tokens each token attends to, instead of all before it.

    ``bits_TW``: int32; bit i % 32 of word i // 32: sees token i of its own sequence's new ones.
    ``positions_T``: int64; a token's distance from the start, which windows and slopes go by.
    """

    bits_TW: Tensor
    positions_T: Tensor


class StepTensors(Record):
    """Int32 tensors on the device that all layers of a step share."""

    query_start_S1: Tensor
    kv_len_S: Tensor
    page_table_SP: Tensor
    tree: TreeAttentionMask | None = None


def channel_blocks(site: AttentionSite) -> tuple[int, int]:
    """Channels of K as a power of two and, where that wastes less, a rest: 576 = 512 + 64. V of a
    latent is within the first."""
    dim = site.head_dim
    power = max(64, next_power_of_2(dim))
    half = power // 2
    wastes_less = half >= 128 and half < dim <= half + half // 2
    if not wastes_less or (site.latent and site.v_dim > half):
        return power, 0
    return half, max(16, next_power_of_2(dim - half))


class Shape(Record):
    """A layer as the kernel is compiled for it, with one tile."""

    site: AttentionSite
    tile: Tile

    @property
    def head_blocks(self) -> int:
        """Programs for the query heads of one KV head."""
        return -(-(self.site.heads // self.site.kv_heads) // self.tile.rows)

    @property
    def group_block(self) -> int:
        """Query heads of a program."""
        return -(-(self.site.heads // self.site.kv_heads) // self.head_blocks)

    @property
    def tokens(self) -> int:
        """Query tokens of a program."""
        return self.tile.rows // self.group_block

    @property
    def lanes(self) -> int:
        """Programs for each unit of work."""
        return self.site.kv_heads * self.head_blocks

    def partial_rows(self, num_units: int) -> int:
        """Rows of the partial results between the two kernels."""
        return num_units * self.lanes * self.tokens * self.group_block

    @property
    def combine_block(self) -> tuple[int, int]:
        """Rows of a program that joins parts, and parts at a time."""
        parts = 16 if self.site.v_dim > 128 else 32
        return (1, parts) if self.tile.rows <= 16 else (8, parts // 8)

    def constants(self) -> dict[str, int]:
        """Constants that both kernels are compiled for."""
        values = max(64, next_power_of_2(self.site.v_dim))
        return {
            "KV_HEADS": self.site.kv_heads,
            "GROUP": self.site.heads // self.site.kv_heads,
            "HEAD_BLOCKS": self.head_blocks,
            "GROUP_BLOCK": self.group_block,
            "TOKENS": self.tokens,
            "V_DIM": self.site.v_dim,
            "BLOCK_V": channel_blocks(self.site)[0] if self.site.latent else values,
        }


def _features(shape: Shape, page_size: int, kind: int, is_extra: bool) -> dict[str, int | bool]:
    site, tile = shape.site, shape.tile
    channels, rest = channel_blocks(site)
    return {
        "KIND": kind,
        "SPLIT_LOOP": tile.rows > 32 and not is_extra,
        "EXTRA": is_extra,
        "LATENT": site.latent,
        "PAGE": page_size,
        "DIM": site.head_dim,
        "BLOCK_C": channels,
        "BLOCK_R": rest,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }


def kind_of(dtype: torch.dtype, device: torch.device) -> int:
    """KIND of a cache: before sm_89 no GPU knows fp8 e4m3."""
    if dtype in SCALED:
        return 3 if dtype == INT4 else 1
    if dtype != torch.float8_e4m3fn or interpreting():
        return 0
    return 2 if torch.cuda.get_device_capability(device) < (8, 9) else 0


def span_of(site: AttentionSite, shape: Shape, num_ahead: int = 0) -> int:
    """Most tokens that a block reads."""
    local = min(site.window or UNBOUNDED, site.chunk or UNBOUNDED)
    return min(UNBOUNDED, local + shape.tokens + shape.tile.keys + num_ahead)


class Prepared(Record):
    """What layers of one kind share in a step: they attend in ``num_units`` of ``work``.
    ``between``: float32 rows of V numbers and their weights, for sequences in several splits; None:
    there are none."""

    shape: Shape
    kind: int  # of the cache
    constants: Mapping[str, int | bool]  # and options of the first kernel
    work: Work
    num_units: int
    between: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        shape: Shape,
        cache: Cache,
        has_tree: bool,
        work: Work,
        num_units: int,
        between: tuple[Tensor, Tensor] | None,
    ) -> Prepared:
        """For layers of ``shape``, whose caches are like this one."""
        kind = kind_of(cache.k_LKC.dtype, cache.k_LKC.device)
        features = _features(shape, cache.page_size, kind, has_extras(shape.site, has_tree))
        options = {"num_warps": shape.tile.num_warps, "num_stages": shape.tile.num_stages}
        constants = shape.constants() | features | options
        return cls(shape, kind, constants, work, num_units, between)


def attend(
    q_THC: Tensor,
    out_THV: Tensor,
    cache: Cache,
    site: AttentionSite,
    step: StepTensors,
    prepared: Prepared,
    max_query_len: int,
) -> None:
    """Attention of a layer into ``out``."""
    shape, kind, work = prepared.shape, prepared.kind, prepared.work
    num_units, between = prepared.num_units, prepared.between
    k, v = cache.k_LKC, cache.k_LKC if cache.v_LKV is None else cache.v_LKV
    if kind == 3 and not site.latent:
        q_THC = rotate(q_THC, 1 / rotated_block(site.head_dim), q_THC.dtype)
    if kind == 2:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    device = q_THC.device
    floats, integers = nothing(torch.float32, device), nothing(torch.int32, device)
    scales = cache.scales or (floats,)
    partial, lse = between or (floats, floats)
    tree = step.tree
    plan = (work.unit_row_U, work.unit_number_U, work.splits_S)
    launch(
        paged.attention_kernel, (num_units, shape.lanes),
        (q_THC, k, v, out_THV, partial, lse, scales[0], scales[-1],
         floats if site.sinks is None else site.sinks,
         floats if site.slopes is None else site.slopes,
         integers if tree is None else tree.bits_TW,
         nothing(torch.int64, device) if tree is None else tree.positions_T,
         step.query_start_S1, step.kv_len_S, step.page_table_SP, *plan, work.split_len_S,
         work.num_units_1),
        (*q_THC.stride()[:2], step.page_table_SP.stride(0),
         0 if tree is None else tree.bits_TW.stride(0), site.scale, site.softcap,
         site.window or UNBOUNDED, site.chunk or UNBOUNDED,
         int(site.sinks is not None), int(site.slopes is not None), int(tree is not None)),
        **prepared.constants,
    )  # fmt: skip
    if between is None:
        return
    block_m, block_p = shape.combine_block
    num_rows = min(shape.tokens, max_query_len) * shape.group_block
    launch(
        paged.combine_kernel, (num_units, shape.lanes, cdiv(num_rows, block_m)),
        (out_THV, partial, lse, step.query_start_S1, *plan, work.num_units_1), (),
        **shape.constants(), BLOCK_M=block_m, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip


def cut_of(
    shape: Shape,
    num_sms: int,
    num_tokens: int,
    num_rows: int,
    max_len: int,
    queries: tuple[int, int] = (1, UNBOUNDED),
    num_ahead: int = 0,
) -> Cut:
    """How a step is cut for one shape, from what is known without looking at lengths.

    ``num_sms`` of the device, 0 to split no sequence; ``max_len``: most tokens that a sequence can
    have; ``queries``: least and largest number of query tokens of the sequences that take part;
    ``num_ahead``: most of the step's own tokens that a token sees behind itself."""
    is_small = shape.tile.rows <= 16
    num_programs = num_sms * (2 if is_small else 1)
    workers = max(1, num_programs // shape.lanes)
    min_split_len = DECODE_LEN if is_small else EXTEND_LEN
    span = span_of(shape.site, shape, num_ahead)
    blocks = max(num_rows, num_tokens // shape.tokens) if queries == (1, UNBOUNDED) else 0
    is_full = not is_small and blocks * shape.lanes >= num_programs
    if is_full or not num_sms or min(max_len, span) <= min_split_len:
        min_split_len = UNBOUNDED
    return Cut(shape.tokens, shape.tile.keys, workers, min_split_len, span, *queries)
