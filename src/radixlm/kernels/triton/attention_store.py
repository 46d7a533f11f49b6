"""Stores the step's K and V in their pages: one kernel for every cache dtype.

Legend: T tokens, K KV heads, C channels of K, V of V, L slots of a layer (page * page_size +
offset).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops.kv import INT4, SCALED, rotated_block
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import cast, e4m3_bits, interpreting

_TOKENS = 16  # of a program
_SMALLEST = tl.constexpr(1e-30)  # as in kernels/ops/kv.py


@triton.jit
def _nearest(x):
    """x rounded to a whole number, halves to even, as torch rounds."""
    nearest = tl.floor(x + 0.5)
    is_half = nearest - x == 0.5
    is_odd = nearest - 2.0 * tl.floor(nearest * 0.5) == 1.0
    return tl.where(is_half & is_odd, nearest - 1.0, nearest)


@triton.jit
def _store_int4(
    x, cache, scales, slot, live, stride, head_stride, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """``_store_rows`` as in kernels/ops/kv.py: quantize_int4; one group of channels at a time."""
    GROUPS: tl.constexpr = (DIM + 31) // 32
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, 16)
    row = (slot * KV_HEADS + head) * GROUPS
    for group in range(GROUPS):
        low_c, high_c = group * 32 + lane, group * 32 + 16 + lane
        at = x + token.to(tl.int64)[:, None] * stride + head * head_stride
        low = tl.load(at + low_c[None, :], mask=live[:, None] & (low_c < DIM)[None, :], other=0.0)
        high = tl.load(
            at + high_c[None, :], mask=live[:, None] & (high_c < DIM)[None, :], other=0.0
        )
        low, high = low.to(tl.float32), high.to(tl.float32)
        is_good = tl.maximum(tl.abs(low), tl.abs(high)) < float("inf")
        is_good = tl.min(is_good.to(tl.int32), 1) == 1
        low, high = tl.where(is_good[:, None], low, 0.0), tl.where(is_good[:, None], high, 0.0)
        top = tl.maximum(tl.max(low, 1), tl.max(high, 1))
        depth = tl.maximum(tl.max(-low, 1), tl.max(-high, 1))
        most = tl.where(top >= depth, top, -depth)
        step = tl.where(tl.abs(most) < _SMALLEST, 0.0, most * -0.125)
        bits = step.to(tl.int32, bitcast=True)  # to bfloat16, nearest even
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        step = tl.where(is_good, bits.to(tl.float32, bitcast=True), float("nan"))
        is_there = (is_good & (step != 0.0))[:, None]
        divisor = tl.where(is_there, step[:, None], 1.0)
        low = tl.where(is_there, _nearest(low / divisor), 0.0)
        high = tl.where(is_there, _nearest(high / divisor), 0.0)
        low = tl.minimum(tl.maximum(low, -8.0), 7.0) + 8.0
        high = tl.minimum(tl.maximum(high, -8.0), 7.0) + 8.0
        to = cache + (row + group)[:, None] * 16 + lane[None, :]
        tl.store(to, (low + 16.0 * high).to(tl.int32).to(tl.uint8), mask=live[:, None])
        tl.store(scales + row + group, step.to(tl.bfloat16), mask=live)


@triton.jit
def rotate_kernel(
    x, out, num_rows, heads, stride, head_stride, scale,
    BLOCKS: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of N channels, times ``scale``; arithmetic and order of kernels/ops/kv.py:
    rotate."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, N)
    mask = (row < num_rows)[:, None] & (c < N)[None, :]
    head = row // BLOCKS
    at = head // heads * stride + head % heads * head_stride + row % BLOCKS * N
    y = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(y, [ROWS, N // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, N])
    to = out + row[:, None] * N + c[None, :]
    tl.store(to, cast(y * scale, out.dtype.element_ty), mask=mask)


def rotate(x_TKC: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """kernels/ops/kv.py: rotate, times ``scale`` (a power of two), as a new tensor of ``dtype``.
    Channels must be contiguous."""
    num_tokens, heads, dim = x_TKC.shape
    out = torch.empty(x_TKC.shape, dtype=dtype, device=x_TKC.device)
    block = rotated_block(dim)
    num_rows, rows = num_tokens * heads * (dim // block), max(1, 2048 // block)
    if num_rows:
        launch(
            rotate_kernel, (cdiv(num_rows, rows),),
            (x_TKC, out), (num_rows, heads, x_TKC.stride(0), x_TKC.stride(1), scale),
            BLOCKS=dim // block, N=block, STEPS=block.bit_length() - 1, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _store_rows(
    x, cache, scales, slot, live, stride, head_stride, head,
    KIND: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One head's rows of a program's tokens. KIND: 0 as they are, 1 int8, 2 clamped (8-bit
    floats), the largest number being ``scales``, 3 the same as bytes of e4m3, 4 int4."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, BLOCK)
    mask = live[:, None] & (c < DIM)[None, :]
    at = x + token.to(tl.int64)[:, None] * stride + head * head_stride + c[None, :]
    row = slot * KV_HEADS + head
    out = cache + row[:, None] * DIM + c[None, :]
    values = tl.load(at, mask=mask, other=0.0)
    if KIND == 4:
        _store_int4(x, cache, scales, slot, live, stride, head_stride, head, KV_HEADS, DIM, TOKENS)
    elif KIND == 1:
        wide = values.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        is_good = tl.min((tl.abs(wide) < float("inf")).to(tl.int32), 1) == 1
        bits = ((largest / 127.0).to(tl.int32, bitcast=True) + 0x80) & -256
        scale = tl.where(largest < _SMALLEST, 0.0, bits.to(tl.float32, bitcast=True))
        scale = tl.where(is_good, scale, float("nan"))
        part = wide / tl.where(scale > 0, scale, 1.0)[:, None]
        part = tl.where(scale[:, None] > 0, part, 0.0)
        nearest = tl.minimum(tl.maximum(_nearest(part), -127.0), 127.0)
        tl.store(out, nearest.to(tl.int8), mask=mask)
        tl.store(scales + row, scale, mask=live)
    elif KIND >= 2:
        wide = values.to(tl.float32)
        capped = tl.where(wide > scales, scales, tl.where(wide < -scales, -scales, wide))
        if KIND == 2:
            tl.store(out, cast(capped, cache.dtype.element_ty), mask=mask)
        else:
            tl.store(out, e4m3_bits(capped), mask=mask)
    else:
        tl.store(out, cast(values.to(tl.float32), cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def store_kernel(
    k, v, k_cache, v_cache, k_scales, v_scales, slots, num_tokens,
    k_stride, k_head_stride, v_stride, v_head_stride,
    KIND: tl.constexpr, HAS_V: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head. Negative slots are left out."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = slot >= 0
    head = tl.program_id(1)
    _store_rows(
        k, k_cache, k_scales, slot, live, k_stride, k_head_stride, head,
        KIND, KV_HEADS, DIM, BLOCK_C, TOKENS,
    )  # fmt: skip
    if HAS_V:
        _store_rows(
            v, v_cache, v_scales, slot, live, v_stride, v_head_stride, head,
            KIND, KV_HEADS, V_DIM, BLOCK_V, TOKENS,
        )  # fmt: skip


def kind_of(dtype: torch.dtype, device: torch.device) -> int:
    """KIND of a cache dtype; GPUs before sm_89 have no e4m3."""
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and not interpreting():
        return 2 if torch.cuda.get_device_capability(device) >= (8, 9) else 3
    if dtype in SCALED:
        return 4 if dtype == INT4 else 1
    return 2 if dtype.itemsize == 1 else 0


def store(
    k_TKC: Tensor, v_TKV: Tensor | None, k_LKC: Tensor, v_LKV: Tensor | None,
    scales: tuple[Tensor, ...], slots_T: Tensor,
) -> None:  # fmt: skip
    """Write rows at slots of one layer's cache; ``scales`` of int8 (float32 [L, K] each) and int4
    (bfloat16 [L, K, G])."""
    num_tokens, kv_heads, dim = k_TKC.shape
    if not num_tokens:
        return
    kind = kind_of(k_LKC.dtype, k_LKC.device)
    if kind == 4 and v_LKV is not None:
        k_TKC = rotate(k_TKC, 1.0, torch.float32)
    max_value = torch.finfo(k_LKC.dtype).max if kind in (2, 3) else 0.0
    if kind == 3:
        k_LKC = k_LKC.view(torch.uint8)
        v_LKV = None if v_LKV is None else v_LKV.view(torch.uint8)
    v, v_cache = (k_TKC, k_LKC) if v_TKV is None or v_LKV is None else (v_TKV, v_LKV)
    k_scales, v_scales = (scales[0], scales[-1]) if scales else (max_value, max_value)
    tokens = _TOKENS if dim <= 128 else 4
    launch(
        store_kernel, (cdiv(num_tokens, tokens), kv_heads),
        (k_TKC, v, k_LKC, v_cache, k_scales, v_scales, slots_T),
        (num_tokens, k_TKC.stride(0), k_TKC.stride(1), v.stride(0), v.stride(1)),
        KIND=kind, HAS_V=v_TKV is not None, KV_HEADS=kv_heads, DIM=dim, V_DIM=v.shape[2],
        BLOCK_C=next_power_of_2(dim), BLOCK_V=next_power_of_2(v.shape[2]),
        TOKENS=tokens, num_warps=4,
    )  # fmt: skip
