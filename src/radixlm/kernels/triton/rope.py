"""Norms and rotary embedding of q and k, and the store of K and V into pages, in one launch.

A program handles some heads of one token. A head's channels are in three parts: the first and the
second channels of rotated pairs (low, high), and the channels that are not rotated (rest).

Legend: T tokens, H query heads, K KV heads, C channels, R half the rotated ones, N pool rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.ops import rope as reference
from radixlm.kernels.ops.rope import QkNorm
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import FLOATS, cast, runs_on
from radixlm.kernels.triton.norm import norm_into

MAX_CHANNELS = 1024
_TILE = 1024  # numbers that a program takes, unless a head is longer
_NONE, _RMS, _LAYER = 0, 1, 2
NONE, RMS, LAYER = tl.constexpr(_NONE), tl.constexpr(_RMS), tl.constexpr(_LAYER)


class Store(Record):
    """Where K and V of a step are stored: rows (page * page_size + offset) of one layer's pool.
    ``slots_T`` int64; negative: not stored."""

    v_TKV: Tensor
    k_pool_NKC: Tensor
    v_pool_NKV: Tensor
    slots_T: Tensor


@triton.jit
def to_cache_dtype(x, dtype: tl.constexpr):
    """float32 x in the dtype of the cache; 8-bit floats saturate."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.float8e5:
        x = tl.clamp(x, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    return cast(x, dtype)


@triton.jit
def _normalize(x, mean, scale, weight_ptr, bias_ptr, index, mask, BIAS: tl.constexpr, dtype: tl.constexpr):  # fmt: skip  # noqa: E501
    x = (x - mean) * scale * tl.load(weight_ptr + index, mask=mask, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + index, mask=mask, other=0.0)
    return cast(x, dtype).to(tl.float32)  # rounded as a separate norm would


@triton.jit
def _prepare_heads(
    x_ptr, weight_ptr, bias_ptr, cos_sin_ptr, cache_ptr, is_head, is_stored, dim, half, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Heads whose first channels are at the pointers [HEADS, 1], in place; also to the cache."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pair = tl.arange(0, HALF)[None, :]
    rest = 2 * half + tl.arange(0, REST)[None, :]
    low = 2 * pair if INTERLEAVED else pair
    high = low + 1 if INTERLEAVED else low + half
    has_pair, has_rest = is_head & (pair < half), is_head & (rest < dim)
    c = tl.load(x_ptr + rest, mask=has_rest, other=0.0).to(tl.float32)
    if ROPE:
        a = tl.load(x_ptr + low, mask=has_pair, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + high, mask=has_pair, other=0.0).to(tl.float32)
    if NORM != NONE:
        mean = 0.0
        if NORM == LAYER:
            total = tl.sum(c, 1)
            if ROPE:
                total += tl.sum(a, 1) + tl.sum(b, 1)
            mean = (total / dim)[:, None]
        centered = tl.where(has_rest, c - mean, 0.0)
        square = tl.sum(centered * centered, 1)
        if ROPE:
            centered_a = tl.where(has_pair, a - mean, 0.0)
            centered_b = tl.where(has_pair, b - mean, 0.0)
            square += tl.sum(centered_a * centered_a + centered_b * centered_b, 1)
        scale = 1.0 / tl.sqrt_rn(square / dim + eps)[:, None]
        c = _normalize(c, mean, scale, weight_ptr, bias_ptr, rest, has_rest, BIAS, dtype)
        if ROPE:
            a = _normalize(a, mean, scale, weight_ptr, bias_ptr, low, has_pair, BIAS, dtype)
            b = _normalize(b, mean, scale, weight_ptr, bias_ptr, high, has_pair, BIAS, dtype)
        tl.store(x_ptr + rest, cast(c, dtype), mask=has_rest)
    if ROPE:
        cos = tl.load(cos_sin_ptr + pair, mask=pair < half, other=0.0)
        sin = tl.load(cos_sin_ptr + half + pair, mask=pair < half, other=0.0)
        rotated_a, rotated_b = cast(a * cos - b * sin, dtype), cast(b * cos + a * sin, dtype)
        tl.store(x_ptr + low, rotated_a, mask=has_pair)
        tl.store(x_ptr + high, rotated_b, mask=has_pair)
    if STORE:
        kind: tl.constexpr = cache_ptr.dtype.element_ty
        tl.store(cache_ptr + rest, to_cache_dtype(c, kind), mask=has_rest & is_stored)
        if ROPE:
            stored_a, stored_b = rotated_a.to(tl.float32), rotated_b.to(tl.float32)
            tl.store(cache_ptr + low, to_cache_dtype(stored_a, kind), mask=has_pair & is_stored)
            tl.store(cache_ptr + high, to_cache_dtype(stored_b, kind), mask=has_pair & is_stored)


@triton.jit
def copy_heads(x_ptr, cache_ptr, is_head, dim, BLOCK: tl.constexpr):
    """Rows of heads at the pointers [HEADS, 1] into the cache."""
    col = tl.arange(0, BLOCK)[None, :]
    mask = is_head & (col < dim)
    x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(cache_ptr + col, to_cache_dtype(x, cache_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_heads", "k_heads"], do_not_specialize_on_alignment=["slots_ptr"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, cos_sin_ptr,
    k_pool_ptr, v_pool_ptr, slots_ptr, q_heads, k_heads, dim, half, v_dim, weight_stride, eps,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_sin_token,
    k_pool_row, k_pool_head, v_pool_row, v_pool_head,
    NORM: tl.constexpr, BIAS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, i): some heads of token t; first those of q, then of k, then of v to store."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(q_heads, HEADS)
    k_parts = tl.cdiv(k_heads, HEADS)
    angles_ptr = cos_sin_ptr + token * cos_sin_token
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        weight_at = head * weight_stride
        _prepare_heads(
            q_ptr + token * q_token + head * q_head,
            q_weight_ptr + weight_at, q_bias_ptr + weight_at, angles_ptr, q_ptr, head < q_heads,
            head < q_heads, dim, half, eps, NORM, BIAS, ROPE, INTERLEAVED, False, HALF, REST,
        )  # fmt: skip
    else:
        head = (part - q_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        row = token
        num_stored = k_heads
        if STORE:
            row = tl.load(slots_ptr + token)
            num_stored = tl.where(row >= 0, k_heads, 0)
        if part < q_parts + k_parts:
            weight_at = head * weight_stride
            _prepare_heads(
                k_ptr + token * k_token + head * k_head,
                k_weight_ptr + weight_at, k_bias_ptr + weight_at, angles_ptr,
                k_pool_ptr + row * k_pool_row + head * k_pool_head, head < k_heads,
                head < num_stored, dim, half, eps, NORM, BIAS, ROPE, INTERLEAVED, STORE, HALF, REST,
            )  # fmt: skip
        elif STORE:
            head = head - k_parts * HEADS
            copy_heads(
                v_ptr + token * v_token + head * v_head,
                v_pool_ptr + row * v_pool_row + head * v_pool_head,
                head < num_stored, v_dim, V_BLOCK,
            )  # fmt: skip


class Tile(Record):
    """Heads of a program, and the blocks of a head's parts."""

    heads: int
    half: int
    rest: int
    v: int

    def num_warps(self, norm: int, is_widest: bool) -> int:
        """``is_widest``: single precision that goes to a cache of 8 bits. Fewer would spill."""
        is_large = self.heads * (2 * self.half + self.rest) > 2 * _TILE
        return 8 if is_large or is_widest or (norm == _LAYER and self.half >= 128) else 4


@functools.cache
def tile_of(dim: int, half: int, v_dim: int) -> Tile:
    """Blocks for heads of ``dim`` channels, ``half`` pairs of them rotated."""
    half_block = max(16, next_power_of_2(half)) if half else 16
    rest_block = max(16, next_power_of_2(dim - 2 * half)) if dim > 2 * half else 16
    v_block = max(16, next_power_of_2(v_dim))
    longest = max(2 * half_block + (rest_block if dim > 2 * half else 0), v_block)
    return Tile(max(1, _TILE // next_power_of_2(longest)), half_block, rest_block, v_block)


def takes_heads(x_THC: Tensor) -> bool:
    """Whether the kernel can work on heads in place."""
    return (
        runs_on(x_THC)
        and x_THC.dtype in FLOATS
        and x_THC.numel() > 0
        and x_THC.shape[2] <= MAX_CHANNELS
        and (x_THC.stride(2) == 1 or x_THC.shape[2] == 1)
    )


def takes(q_THC: Tensor, k_TKC: Tensor, norm: QkNorm | None) -> bool:
    """Whether ``prepare`` can work on q and k."""
    is_dense = norm is None or norm.kind != "row" or all(map(_has_dense_rows, (q_THC, k_TKC)))
    weights = () if norm is None else (norm.q_weight, norm.k_weight)
    return (
        takes_heads(q_THC)
        and takes_heads(k_TKC)
        and q_THC.dtype == k_TKC.dtype
        and q_THC.shape[2] == k_TKC.shape[2]
        and is_dense
        and all(w.is_contiguous() and w.dtype == torch.float32 for w in weights)
    )


def _has_dense_rows(x_THC: Tensor) -> bool:
    return x_THC.shape[1] == 1 or x_THC.stride(1) == x_THC.shape[2]


def prepare(
    q_THC: Tensor,
    k_TKC: Tensor,
    norm: QkNorm | None,
    cos_sin_T2R: Tensor | None,
    interleaved: bool,
    store: Store | None = None,
) -> None:
    """Normalise, then rotate q and k in place; with ``store``, K as it is then, and V, also go to
    the pool. See kernels/ops/rope.py."""
    if norm is not None and norm.kind == "row":
        for x, weight, bias in (
            (q_THC, norm.q_weight, norm.q_bias),
            (k_TKC, norm.k_weight, norm.k_bias),
        ):
            rows = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
            norm_into(rows, rows, weight, bias, norm.eps, norm.is_layer_norm)
        norm = None
    if norm is None and cos_sin_T2R is None and store is None:
        return
    _launch(q_THC, k_TKC, norm, cos_sin_T2R, interleaved, store)


def rotate(x_THC: Tensor, cos_sin_T2R: Tensor, interleaved: bool) -> None:
    """Rotate heads in place; see ``rope`` in kernels/ops/rope.py."""
    _launch(x_THC, x_THC[:, :0], None, cos_sin_T2R, interleaved, None)


def _launch(
    q: Tensor,
    k: Tensor,
    norm: QkNorm | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    store: Store | None,
) -> None:
    tokens, q_heads, dim = q.shape
    k_heads = k.shape[1]
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    v, k_pool, v_pool, slots = (
        (q, q, q, q)
        if store is None
        else (store.v_TKV, store.k_pool_NKC, store.v_pool_NKV, store.slots_T)
    )
    v_dim = v.shape[2] if store is not None else 1
    tile = tile_of(dim, half, v_dim)
    weights: tuple[Any, ...] = (q, q, q, q)
    weight_stride = 0
    if norm is not None:
        weights = (norm.q_weight, norm.k_weight)
        weights += (q, q) if norm.q_bias is None else (norm.q_bias, norm.k_bias)
        weight_stride = dim if norm.kind == "each" else 0
    parts = cdiv(q_heads, tile.heads) + cdiv(k_heads, tile.heads) * (1 if store is None else 2)
    launch(
        prepare_kernel, (tokens, parts),
        (q, k, v, *weights, q if cos_sin is None else cos_sin, k_pool, v_pool, slots),
        (q_heads, k_heads, dim, half, v_dim, weight_stride, 0.0 if norm is None else norm.eps,
         *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
         0 if cos_sin is None else cos_sin.stride(0),
         *k_pool.stride()[:2], *v_pool.stride()[:2]),
        NORM=_kind(norm), BIAS=norm is not None and norm.q_bias is not None,
        ROPE=cos_sin is not None, INTERLEAVED=interleaved, STORE=store is not None,
        HEADS=tile.heads, HALF=tile.half, REST=tile.rest, V_BLOCK=tile.v,
        num_warps=tile.num_warps(
            _kind(norm), q.dtype == torch.float32 and k_pool.dtype.itemsize == 1
        ),
    )  # fmt: skip


def _kind(norm: QkNorm | None) -> int:
    if norm is None:
        return _NONE
    return _LAYER if norm.is_layer_norm else _RMS


def rope(x_THD: Tensor, cos_sin_T2R: Tensor, interleaved: bool) -> None:
    """See kernels/ops/rope.py."""
    if takes_heads(x_THD):
        rotate(x_THD, cos_sin_T2R, interleaved)
    else:
        reference.rope(x_THD, cos_sin_T2R, interleaved)


def prepare_qk(
    q_THD: Tensor,
    k_TKD: Tensor,
    norm: QkNorm | None,
    cos_sin_T2R: Tensor | None,
    interleaved: bool,
) -> None:
    """See kernels/ops/rope.py."""
    if takes(q_THD, k_TKD, norm):
        prepare(q_THD, k_TKD, norm, cos_sin_T2R, interleaved)
    else:
        reference.prepare_qk(q_THD, k_TKD, norm, cos_sin_T2R, interleaved)
