"""One GEMM kernel for all weights: dense or by expert, float or quantized.

    out[m, n] = act(sum_k x[m, k] w[n, k] * scales + bias[n]) * row weight

Weights are stored as [E, N, K] (dense: E = 1). Gated weights have interleaved rows (gate 0, up 0,
gate 1, ...): one thread then holds both columns of a pair, and gating needs no memory traffic. Sums
are float32. A row's result does not depend on the other rows of its tile.

Legend: M rows, N outputs, K inputs, E experts, S slots (token, choice), G groups of inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixlm.kernels.triton.activation import swish_gated
from radixlm.kernels.triton.mode import INTERPRET, if_set, operand

# Kinds of weights, and the scales of each
PLAIN = 0  # of the type of x
INT8 = 1  # int8, float [E, N]; x stays float
W8A8 = 2  # int8, float [E, N]; x int8 with float [M]
INT4 = 3  # uint8 [E, K / 2, N] (see gemm_int.pack_int4), float [E, G, N]; x stays float
FP8 = 4  # e4m3, float [E, N]; x e4m3 with float [M]
FP8_BLOCK = 5  # e4m3, float [E, N / 128, K / 128]; x e4m3 with float [M, K / 128]
FP8_WIDE = 6  # bytes of e4m3, scales as FP8; x stays float (GPUs older than sm_89)
FP8_BLOCK_WIDE = 7  # bytes of e4m3, scales as FP8_BLOCK; x stays float
INT4_SHIFTED = 8  # as INT4 with zero points of their own: float [E, 2 G, N], scales, then these
ALL = tuple(range(INT4_SHIFTED + 1))
NIBBLES = (INT4, INT4_SHIFTED)
SCALED_ROWS = (INT8, W8A8, FP8, FP8_WIDE)  # a scale for each output
QUANTIZED_X = (W8A8, FP8, FP8_BLOCK)
FP8_GROUP = 128

_PLAIN, _INT8, _W8A8, _INT4 = (tl.constexpr(kind) for kind in (PLAIN, INT8, W8A8, INT4))
_FP8, _FP8_BLOCK = tl.constexpr(FP8), tl.constexpr(FP8_BLOCK)
_FP8_WIDE, _FP8_BLOCK_WIDE = tl.constexpr(FP8_WIDE), tl.constexpr(FP8_BLOCK_WIDE)
_INT4_SHIFTED = tl.constexpr(INT4_SHIFTED)
_GROUP = tl.constexpr(FP8_GROUP)


@triton.jit
def fp8_as_half(byte):
    """float16 of e4m3 bytes, 1/256 of their value: the bits moved to float16's positions. For GPUs
    without fp8; NaN is not preserved."""
    bits = byte.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _cast_weight(w, x):
    """Weights in the type of x; the interpreter cannot write bfloat16."""
    if INTERPRET:
        w = w.to(tl.float32)
    else:
        w = w.to(x.dtype)
    return w


@triton.jit
def scale_rows(col, num_out, is_paired):
    """Row of blockwise scales of each output; gate and up have blocks of their own."""
    half = num_out // 2
    paired = (col % 2) * ((half + _GROUP - 1) // _GROUP) + (col // 2) // _GROUP
    return tl.where(is_paired != 0, paired, col // _GROUP)


@triton.jit
def load_dequantized(
    w_ptr, w_scale_ptr, expert, col, start, num_out, num_in, group, is_paired,
    KIND: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K inputs from ``start`` of outputs ``col`` of an expert as float32 [col, input], 0 past
    the last input; scales that are the same for all inputs are left out. A block of 4 bit weights
    lies within a group."""
    at = start + tl.arange(0, BLOCK_K)
    is_in = (at < num_in)[None, :]
    if (KIND == _INT4) | (KIND == _INT4_SHIFTED):
        chunks = (num_in + CHUNK - 1) // CHUNK
        byte = at // CHUNK * (CHUNK // 2) + at % (CHUNK // 2)
        w_at = w_ptr + expert * num_out * chunks * (CHUNK // 2) + col[:, None]
        packed = tl.load(w_at + byte[None, :] * num_out, mask=is_in, other=0)
        is_high = (at % CHUNK >= CHUNK // 2)[None, :]
        w = tl.where(is_high, packed >> 4, packed & 15).to(tl.float32)
        if KIND == _INT4:
            w -= 8.0
            scale_at = w_scale_ptr + expert * num_out * (num_in // group) + col[:, None]
        else:
            scale_at = w_scale_ptr + expert * num_out * (num_in // group * 2) + col[:, None]
            line = num_in // group + tl.minimum(start, num_in - 1) // group
            w -= tl.load(scale_at + line * num_out)
        w *= tl.load(scale_at + tl.minimum(start, num_in - 1) // group * num_out)
    else:
        w_at = w_ptr + expert * num_out * num_in + col.to(tl.int64)[:, None] * num_in
        w = tl.load(w_at + at[None, :], mask=is_in, other=0.0)
        if (KIND == _FP8_WIDE) | (KIND == _FP8_BLOCK_WIDE):
            w = fp8_as_half(w).to(tl.float32) * 256.0
        w = w.to(tl.float32)
        if (KIND == _FP8_BLOCK) | (KIND == _FP8_BLOCK_WIDE):
            groups = (num_in + _GROUP - 1) // _GROUP
            rows = scale_rows(num_out - 1, num_out, is_paired) + 1
            scale_row = expert * rows + scale_rows(col, num_out, is_paired)
            scale_at = w_scale_ptr + scale_row[:, None] * groups
            block = start // _GROUP + tl.arange(0, BLOCK_K // _GROUP)[None, :]
            scale = tl.load(scale_at + block, mask=block < groups, other=0.0)
            blocks = tl.reshape(w, (BLOCK_N, BLOCK_K // _GROUP, _GROUP)) * scale[:, :, None]
            w = tl.reshape(blocks, (BLOCK_N, BLOCK_K))
    return w


@triton.jit
def _dot(x, w, acc, KIND: tl.constexpr):
    """acc + x w, integers as int32, fp8 with sums that are moved to float32 every 128 inputs."""
    if INTERPRET:
        acc = tl.dot(operand(x), operand(w), acc, input_precision="ieee")
    elif KIND == _W8A8:
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    elif KIND == _FP8:
        acc = tl.dot(x, w, acc, max_num_imprecise_acc=128)
    else:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _sum(
    x_at, x_scale_at, w_at, w_scale_at, num_in,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Accumulate products. If 128 inputs share a scale, each product of 128 inputs is scaled before
    it is added; scales that are the same for all inputs, and fp8's 256, are applied at the end."""
    IS_INT: tl.constexpr = (KIND == _W8A8) & (not INTERPRET)
    IS_WIDE: tl.constexpr = (KIND == _FP8_WIDE) | (KIND == _FP8_BLOCK_WIDE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_INT else tl.float32)
    k = tl.arange(0, BLOCK_K)
    x_at += k[None, :]
    w_at += k[:, None]
    for start in range(0, num_in, BLOCK_K):
        x = tl.load(x_at, mask=k[None, :] < num_in - start, other=0.0)
        w = tl.load(w_at, mask=k[:, None] < num_in - start, other=0.0)
        if IS_WIDE:
            w = fp8_as_half(w)
        if w.dtype != x.dtype:
            w = _cast_weight(w, x)
        if (KIND == _FP8_BLOCK) | (KIND == _FP8_BLOCK_WIDE):
            scale = tl.load(w_scale_at + start // _GROUP)[None, :]
            if KIND == _FP8_BLOCK:
                scale = tl.load(x_scale_at + start // _GROUP)[:, None] * scale
            acc += _dot(x, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), KIND) * scale
        else:
            acc = _dot(x, w, acc, KIND)
        x_at += BLOCK_K
        w_at += BLOCK_K
    acc = acc.to(tl.float32)
    if IS_WIDE:
        acc *= 256.0
    return acc


@triton.jit
def _sum_nibbles(
    x_at, w_at, w_scale_at, is_col, num_out, num_in, group,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """4 bit values, scaled after the product of each half of a chunk of BLOCK_K inputs. Minus
    integer zero points they are exact in 16 bits."""
    HALF: tl.constexpr = BLOCK_K // 2
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, HALF)
    x_at += k[None, :]
    w_at += k[:, None] * num_out
    last = num_in // group - 1
    for start in range(0, num_in, BLOCK_K):
        packed = tl.load(w_at, mask=is_col[None, :], other=0)
        x_low = tl.load(x_at, mask=k[None, :] < num_in - start, other=0.0)
        x_high = tl.load(x_at + HALF, mask=k[None, :] + HALF < num_in - start, other=0.0)
        if KIND == _INT4:
            low = _cast_weight((packed & 15).to(tl.int8) - 8, x_low)
            high = _cast_weight((packed >> 4).to(tl.int8) - 8, x_low)
        else:
            zero_at = w_scale_at + (last + 1) * num_out
            low_zero = tl.load(zero_at + start // group * num_out, mask=is_col, other=0.0)
            high_at = zero_at + tl.minimum((start + HALF) // group, last) * num_out
            high_zero = tl.load(high_at, mask=is_col, other=0.0)
            low = _cast_weight((packed & 15).to(tl.float32) - low_zero[None, :], x_low)
            high = _cast_weight((packed >> 4).to(tl.float32) - high_zero[None, :], x_low)
        low_scale = tl.load(w_scale_at + start // group * num_out, mask=is_col, other=0.0)
        high_group = tl.minimum((start + HALF) // group, last)
        high_scale = tl.load(w_scale_at + high_group * num_out, mask=is_col, other=0.0)
        acc += _dot(x_low, low, zero, _INT4) * low_scale[None, :]
        acc += _dot(x_high, high, zero, _INT4) * high_scale[None, :]
        x_at += BLOCK_K
        w_at += HALF * num_out
    return acc


@triton.jit
def _swizzle(pid, num_blocks, num_cols, GROUP_M: tl.constexpr):
    """Block of rows and of outputs of a program, in groups of GROUP_M row blocks that share outputs
    in the L2 cache."""
    width = GROUP_M * num_cols
    first = pid // width * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    return first + pid % width % size, pid % width // size


@triton.jit
def _store(
    acc, out_ptr, row_weight_ptr, slot, is_row, block_n, num_out, is_weighted, limit, alpha, shift,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The finished tile, of gated weights half as wide."""
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        y = swish_gated(gate, up, limit, alpha, shift)
        width = num_out // 2
        col = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc
        width = num_out
        col = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y *= tl.load(row_weight_ptr + slot, mask=if_set(is_weighted, is_row), other=1.0)[:, None]
    at = out_ptr + slot.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (col < width)[None, :])


@triton.jit
def _rows_of(slots_ptr, owners_ptr, by_expert, block_m, BLOCK_M: tl.constexpr):
    """(rows of a block, its expert): consecutive rows, or the slots of a block by expert."""
    lane = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    owner = tl.load(owners_ptr + tl.where(by_expert != 0, block_m, 0))
    slot = tl.load(slots_ptr + lane, mask=if_set(by_expert, lane >= 0), other=0)
    return tl.where(by_expert != 0, slot, lane), owner


# integers that Triton would otherwise specialize on, with a compilation each
_FREE = ["num_rows", "num_blocks", "group", "by_expert", "top_k", "has_bias", "is_weighted",
         "is_paired", "limit", "alpha", "shift"]  # fmt: skip


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=["owners_ptr"])
def gemm_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, slots_ptr, owners_ptr,
    row_weight_ptr, num_rows, num_blocks, num_out, num_in, x_stride,
    group, by_expert, top_k, has_bias, is_weighted, is_paired, limit, alpha, shift,
    KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A program computes one tile. By expert, rows are slots: slot s reads row s // top_k of x and
    writes row s of out; ``num_rows`` is the number of slots."""
    block_m, block_n = _swizzle(
        tl.program_id(0), num_blocks, (num_out + BLOCK_N - 1) // BLOCK_N, GROUP_M
    )
    slot, owner = _rows_of(slots_ptr, owners_ptr, by_expert, block_m, BLOCK_M)
    if owner < 0:
        return
    expert = owner.to(tl.int64)
    is_row = slot < num_rows
    row = tl.minimum(slot, num_rows - 1) // top_k
    col = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = col < num_out
    safe_col = tl.minimum(col, num_out - 1)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride
    if (KIND == _INT4) | (KIND == _INT4_SHIFTED):
        chunks = (num_in + BLOCK_K - 1) // BLOCK_K
        w_at = w_ptr + expert * num_out * chunks * (BLOCK_K // 2) + col[None, :]
        if KIND == _INT4:
            scale_at = w_scale_ptr + expert * num_out * (num_in // group) + col
        else:
            scale_at = w_scale_ptr + expert * num_out * (num_in // group * 2) + col
        acc = _sum_nibbles(
            x_at, w_at, scale_at, is_col, num_out, num_in, group, KIND, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        w_at = w_ptr + expert * num_out * num_in + (safe_col.to(tl.int64) * num_in)[None, :]
        groups = (num_in + _GROUP - 1) // _GROUP
        rows = scale_rows(num_out - 1, num_out, is_paired) + 1
        scale_row = expert * rows + scale_rows(safe_col, num_out, is_paired)
        acc = _sum(
            x_at, x_scale_ptr + row * groups, w_at, w_scale_ptr + scale_row * groups, num_in,
            KIND, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if (KIND == _INT8) | (KIND == _W8A8) | (KIND == _FP8) | (KIND == _FP8_WIDE):
        acc *= tl.load(w_scale_ptr + expert * num_out + safe_col)[None, :]
    if (KIND == _W8A8) | (KIND == _FP8):
        acc *= tl.load(x_scale_ptr + row)[:, None]
    if has_bias != 0:
        acc += tl.load(bias_ptr + expert * num_out + safe_col).to(tl.float32)[None, :]
    _store(
        acc, out_ptr, row_weight_ptr, slot, is_row, block_n, num_out, is_weighted, limit, alpha,
        shift, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
