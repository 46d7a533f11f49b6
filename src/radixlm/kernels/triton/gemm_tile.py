"""One kernel for every product of rows with weights: dense or by expert, float or quantised.

    out[m, n] = act(sum_k x[m, k] w[n, k] * scales + bias[n]) * row weight

Weights lie as [E, N, K] (dense: E = 1). Gated weights have their rows interleaved (gate 0, up 0,
gate 1, ...): the two columns of a pair then lie in one thread, and the gate costs no traffic.
Sums are float32. A row's numbers do not depend on the other rows of its tile.

Legend: M rows, N outputs, K inputs, E experts, S slots (token, choice), G groups of inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixlm.kernels.triton.activation import CODES, gated
from radixlm.kernels.triton.mode import INTERPRET, operand

# Kinds of weights, and the scales of each
PLAIN = 0  # of the type of x
INT8 = 1  # int8, float [E, N]; x stays float
W8A8 = 2  # int8, float [E, N]; x int8 with float [M]
INT4 = 3  # uint8 [E, K / 2, N] (see gemm_int.pack_int4), float [E, G, N]; x stays float
FP8 = 4  # e4m3, float [E, N]; x e4m3 with float [M]
FP8_BLOCK = 5  # e4m3, float [E, N / 128, K / 128]; x e4m3 with float [M, K / 128]
FP8_WIDE = 6  # bytes of e4m3, scales as FP8; x stays float (GPUs older than sm_89)
FP8_BLOCK_WIDE = 7  # bytes of e4m3, scales as FP8_BLOCK; x stays float
SCALED_ROWS = (INT8, W8A8, FP8, FP8_WIDE)  # a scale for each output
QUANTISED_X = (W8A8, FP8, FP8_BLOCK)
FP8_GROUP = 128

_PLAIN, _INT8, _W8A8, _INT4 = (tl.constexpr(kind) for kind in (PLAIN, INT8, W8A8, INT4))
_FP8, _FP8_BLOCK = tl.constexpr(FP8), tl.constexpr(FP8_BLOCK)
_FP8_WIDE, _FP8_BLOCK_WIDE = tl.constexpr(FP8_WIDE), tl.constexpr(FP8_BLOCK_WIDE)
_GROUP = tl.constexpr(FP8_GROUP)

# Activations of the gate; 0 is none
ACTS = {name: code + 1 for name, code in CODES.items() if name != "sigmoid"}


@triton.jit
def fp8_widened(byte):
    """float16 of e4m3 bytes, 1/256 of their value: the bits moved to float16's places. Runs where
    the GPU knows no fp8; numbers that are none are not kept."""
    bits = byte.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _as(w, x):
    """Widened weights in the type of x; the interpreter cannot write bfloat16."""
    if INTERPRET:
        w = w.to(tl.float32)
    else:
        w = w.to(x.dtype)
    return w


@triton.jit
def scale_rows(col, num_out, PAIRED: tl.constexpr):
    """Row of blockwise scales of each output; gate and up have blocks of their own."""
    if PAIRED:
        half = num_out // 2
        return (col % 2) * ((half + _GROUP - 1) // _GROUP) + (col // 2) // _GROUP
    return col // _GROUP


@triton.jit
def unpacked(
    w_ptr, w_scale_ptr, expert, col, start, num_out, num_in,
    KIND: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K inputs from ``start`` of outputs ``col`` of an expert as float32 [col, input], 0 past
    the last input; scales that are the same for all inputs are left out. A block of 4 bit weights
    lies within a group."""
    at = start + tl.arange(0, BLOCK_K)
    is_in = (at < num_in)[None, :]
    if KIND == _INT4:
        chunks = (num_in + CHUNK - 1) // CHUNK
        byte = at // CHUNK * (CHUNK // 2) + at % (CHUNK // 2)
        w_at = w_ptr + expert * num_out * chunks * (CHUNK // 2) + col[:, None]
        packed = tl.load(w_at + byte[None, :] * num_out, mask=is_in, other=0)
        is_high = (at % CHUNK >= CHUNK // 2)[None, :]
        w = tl.where(is_high, packed >> 4, packed & 15).to(tl.float32) - 8.0
        scale_at = w_scale_ptr + expert * num_out * (num_in // GROUP) + col[:, None]
        w *= tl.load(scale_at + tl.minimum(start, num_in - 1) // GROUP * num_out)
    else:
        w_at = w_ptr + expert * num_out * num_in + col.to(tl.int64)[:, None] * num_in
        w = tl.load(w_at + at[None, :], mask=is_in, other=0.0)
        if (KIND == _FP8_WIDE) | (KIND == _FP8_BLOCK_WIDE):
            w = fp8_widened(w).to(tl.float32) * 256.0
        w = w.to(tl.float32)
        if (KIND == _FP8_BLOCK) | (KIND == _FP8_BLOCK_WIDE):
            groups = (num_in + _GROUP - 1) // _GROUP
            rows = scale_rows(num_out - 1, num_out, PAIRED) + 1
            scale_row = expert * rows + scale_rows(col, num_out, PAIRED)
            scale_at = w_scale_ptr + scale_row[:, None] * groups
            group = start // _GROUP + tl.arange(0, BLOCK_K // _GROUP)[None, :]
            scale = tl.load(scale_at + group, mask=group < groups, other=0.0)
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
def _sum_rows(
    x_at, w_at, num_in,
    KIND: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products whose scales are the same for all inputs; the scales are left to the end."""
    IS_INT: tl.constexpr = (KIND == _W8A8) & (not INTERPRET)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_INT else tl.float32)
    k = tl.arange(0, BLOCK_K)
    x_at += k[None, :]
    w_at += k[:, None]
    for start in range(0, num_in, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=k[None, :] < num_in - start, other=0.0)
            w = tl.load(w_at, mask=k[:, None] < num_in - start, other=0.0)
        if KIND == _FP8_WIDE:
            w = fp8_widened(w)
        if (KIND == _INT8) | (KIND == _FP8_WIDE) | ((KIND == _PLAIN) & (w.dtype != x.dtype)):
            w = _as(w, x)
        acc = _dot(x, w, acc, KIND)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return acc.to(tl.float32)


@triton.jit
def _sum_blocks(
    x_at, x_scale_at, w_at, w_scale_at, num_in,
    KIND: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """e4m3 with a scale for each 128 inputs: each product of so many is scaled, then added."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    x_at += k[None, :]
    w_at += k[:, None]
    for start in range(0, num_in, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=k[None, :] < num_in - start, other=0.0)
            w = tl.load(w_at, mask=k[:, None] < num_in - start, other=0.0)
        scale = tl.load(w_scale_at + start // _GROUP)[None, :]
        if KIND == _FP8_BLOCK_WIDE:
            w = _as(fp8_widened(w), x)
            scale *= 256.0
        else:
            scale = tl.load(x_scale_at + start // _GROUP)[:, None] * scale
        acc += _dot(x, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), KIND) * scale
        x_at += BLOCK_K
        w_at += BLOCK_K
    return acc


@triton.jit
def _sum_nibbles(
    x_at, w_at, w_scale_at, is_col, num_out, num_in,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Values of 4 bits, scaled after the product of each half of a chunk of BLOCK_K inputs."""
    HALF: tl.constexpr = BLOCK_K // 2
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, HALF)
    x_at += k[None, :]
    w_at += k[:, None] * num_out
    last = num_in // GROUP - 1
    for start in range(0, num_in, BLOCK_K):
        packed = tl.load(w_at, mask=is_col[None, :], other=0)
        if EVEN_K:
            x_low = tl.load(x_at)
            x_high = tl.load(x_at + HALF)
        else:
            x_low = tl.load(x_at, mask=k[None, :] < num_in - start, other=0.0)
            x_high = tl.load(x_at + HALF, mask=k[None, :] + HALF < num_in - start, other=0.0)
        low = _as((packed & 15).to(tl.int8) - 8, x_low)
        high = _as((packed >> 4).to(tl.int8) - 8, x_low)
        low_scale = tl.load(w_scale_at + start // GROUP * num_out, mask=is_col, other=0.0)
        if GROUP == BLOCK_K:
            both = _dot(x_high, high, _dot(x_low, low, zero, _INT4), _INT4)
            acc += both * low_scale[None, :]
        else:
            group = tl.minimum((start + HALF) // GROUP, last)
            high_scale = tl.load(w_scale_at + group * num_out, mask=is_col, other=0.0)
            acc += _dot(x_low, low, zero, _INT4) * low_scale[None, :]
            acc += _dot(x_high, high, zero, _INT4) * high_scale[None, :]
        x_at += BLOCK_K
        w_at += HALF * num_out
    return acc


@triton.jit
def _place(pid, num_blocks, num_cols, GROUP_M: tl.constexpr):
    """Block of rows and of outputs of a program: GROUP_M blocks of rows share outputs in turn."""
    width = GROUP_M * num_cols
    first = pid // width * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    return first + pid % width % size, pid % width // size


@triton.jit
def _store(
    acc, out_ptr, row_weight_ptr, slot, is_row, block_n, num_out,
    ACT: tl.constexpr, IS_WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The finished tile, of gated weights half as wide."""
    if ACT > 0:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        y = gated(gate, up, ACT - 1)
        width = num_out // 2
        col = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc
        width = num_out
        col = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_WEIGHTED:
        y *= tl.load(row_weight_ptr + slot, mask=is_row, other=0.0)[:, None]
    at = out_ptr + slot.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (col < width)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def gemm_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, slots_ptr, owners_ptr,
    row_weight_ptr, num_rows, num_blocks, num_out, num_in, x_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, BY_EXPERT: tl.constexpr, TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, IS_WEIGHTED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A program makes one tile. By expert, rows are slots: slot s reads row s // TOP_K of x and
    writes row s of out; ``num_rows`` is the number of slots."""
    block_m, block_n = _place(
        tl.program_id(0), num_blocks, (num_out + BLOCK_N - 1) // BLOCK_N, GROUP_M
    )
    slot = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.zeros((), tl.int64)
    if BY_EXPERT:
        owner = tl.load(owners_ptr + block_m)
        if owner < 0:
            return
        expert = owner.to(tl.int64)
        slot = tl.load(slots_ptr + slot)
    is_row = slot < num_rows
    row = tl.minimum(slot, num_rows - 1) // TOP_K
    col = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = col < num_out
    near = tl.minimum(col, num_out - 1)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride
    if KIND == _INT4:
        chunks = (num_in + BLOCK_K - 1) // BLOCK_K
        w_at = w_ptr + expert * num_out * chunks * (BLOCK_K // 2) + col[None, :]
        scale_at = w_scale_ptr + expert * num_out * (num_in // GROUP) + col
        acc = _sum_nibbles(
            x_at, w_at, scale_at, is_col, num_out, num_in, GROUP, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        w_at = w_ptr + expert * num_out * num_in + (near.to(tl.int64) * num_in)[None, :]
        if (KIND == _FP8_BLOCK) | (KIND == _FP8_BLOCK_WIDE):
            groups = (num_in + _GROUP - 1) // _GROUP
            rows = scale_rows(num_out - 1, num_out, ACT > 0) + 1
            scale_row = expert * rows + scale_rows(near, num_out, ACT > 0)
            acc = _sum_blocks(
                x_at, x_scale_ptr + row * groups, w_at, w_scale_ptr + scale_row * groups, num_in,
                KIND, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = _sum_rows(x_at, w_at, num_in, KIND, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
            if KIND != _PLAIN:
                scale = tl.load(w_scale_ptr + expert * num_out + near)
                if KIND == _FP8_WIDE:
                    scale *= 256.0
                acc *= scale[None, :]
            if (KIND == _W8A8) | (KIND == _FP8):
                acc *= tl.load(x_scale_ptr + row)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * num_out + near).to(tl.float32)[None, :]
    _store(
        acc, out_ptr, row_weight_ptr, slot, is_row, block_n, num_out, ACT, IS_WEIGHTED, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
