"""Experts for a few tokens: each weight is read once by a program that multiplies it with one row.
No sorting, no padding; all kinds of weights, activations in their own dtype.

Legend: T tokens, K chosen experts, S = T * K slots, D channels, I inner channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.activation import SWISH, swish_gated
from radixlm.kernels.triton.gemm import Packed, int4_chunk
from radixlm.kernels.triton.gemm_tile import load_dequantized
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import if_set, interpreting, nothing

_SIZE = 4096  # numbers of a step
STAGES = tl.constexpr(3)  # steps whose weights are on their way
_BUSY = 264  # programs that keep a GPU of 132 SMs busy


@triton.jit
def _products(
    x_at, w_ptr, w_scale_ptr, expert, col, num_out, num_in, group, is_paired,
    KIND: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of x with outputs ``col`` of an expert: float32 [BLOCK_N], scaled."""
    near = tl.minimum(col, num_out - 1)
    k = tl.arange(0, BLOCK_K)
    if ONE_STEP:
        x = tl.load(x_at + k, mask=k < num_in, other=0.0).to(tl.float32)[None, :]
        acc = x * load_dequantized(
            w_ptr, w_scale_ptr, expert, near, 0, num_out, num_in, group, is_paired, KIND, CHUNK,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.range(0, num_in, BLOCK_K, num_stages=STAGES):
            at = start + k
            x = tl.load(x_at + at, mask=at < num_in, other=0.0).to(tl.float32)[None, :]
            acc += x * load_dequantized(
                w_ptr, w_scale_ptr, expert, near, start, num_out, num_in, group, is_paired, KIND,
                CHUNK, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    y = tl.sum(acc, 1)
    if SCALED:
        y *= tl.load(w_scale_ptr + expert * num_out + near)
    return y


_FREE = ["group", "top_k", "has_bias", "limit", "alpha", "shift"]  # never compiled in


@triton.jit(do_not_specialize=_FREE)
def gemv_up_kernel(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, ids_ptr, num_out, num_in, x_stride,
    group, top_k, has_bias, limit, alpha, shift,
    KIND: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Program (slot, block): act(gate) * up of one token through one of its experts; with SKIPS
    nothing for the expert -1."""
    slot = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    if SKIPS:
        if expert < 0:
            return
    y = _products(
        x_ptr + slot // top_k * x_stride, w_ptr, w_scale_ptr, expert, col, num_out, num_in,
        group, True, KIND, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
    )  # fmt: skip
    bias_at = bias_ptr + expert * num_out + tl.minimum(col, num_out - 1)
    y += tl.load(bias_at, mask=if_set(has_bias, col >= 0), other=0.0)
    gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
    out = swish_gated(gate, up, limit, alpha, shift).to(out_ptr.dtype.element_ty)
    half = num_out // 2
    at = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + slot * half + at, out, mask=at < half)


@triton.jit
def _weighted(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, row_weight_ptr, slot, expert, col, num_out, num_in, group,
    has_bias,
    KIND: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What an expert gives for one row, times the row's weight: float32 [BLOCK_N]."""
    y = _products(
        x_ptr + slot * num_in, w_ptr, w_scale_ptr, expert, col, num_out, num_in,
        group, False, KIND, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
    )  # fmt: skip
    bias_at = bias_ptr + expert * num_out + tl.minimum(col, num_out - 1)
    y += tl.load(bias_at, mask=if_set(has_bias, col >= 0), other=0.0)
    return y * tl.load(row_weight_ptr + slot)


@triton.jit(do_not_specialize=_FREE[:3])
def gemv_down_kernel(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, ids_ptr, row_weight_ptr, num_out, num_in,
    group, top_k, has_bias,
    KIND: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the weighted sum over the token's experts, in their order; with SKIPS
    without the expert -1."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.range(top_k, num_stages=STAGES):
        slot = token * top_k + choice
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        if SKIPS:
            if expert >= 0:
                total += _weighted(
                    x_ptr, w_ptr, w_scale_ptr, bias_ptr, row_weight_ptr, slot, expert, col,
                    num_out, num_in, group, has_bias,
                    KIND, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
                )  # fmt: skip
        else:
            total += _weighted(
                x_ptr, w_ptr, w_scale_ptr, bias_ptr, row_weight_ptr, slot, expert, col,
                num_out, num_in, group, has_bias,
                KIND, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
            )  # fmt: skip
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_out + col, out, mask=col < num_out)


def _blocks(kind: int, rows: int, num_out: int) -> tuple[int, int]:
    """Outputs and inputs of a step: few outputs where there are few rows, to use every SM."""
    if kind in kinds.NIBBLES:  # bytes of neighbouring outputs lie side by side; within any group
        return 64, 32
    if interpreting():  # a program costs much there, its size little
        return 64, 256
    block = 16 if rows * num_out >= 8 * _BUSY else 4
    return block, _SIZE // block


def _choice(packed: Packed, rows: int) -> dict[str, int | bool]:
    """Compile-time constants for ``rows`` rows of programs."""
    block_n, block_k = _blocks(packed.kind, rows, packed.num_out)
    # of single precision all inputs at once spill with Triton 3.6
    is_one = packed.num_in <= block_k and packed.data.dtype != torch.float32
    return _constants(packed.kind, packed.group, block_n, block_k, is_one)


def _constants(
    kind: int, group: int, block_n: int, block_k: int, is_one: bool
) -> dict[str, int | bool]:
    return {
        "KIND": kinds.INT8 if kind == kinds.W8A8 else kind,  # here x stays as it is
        "SCALED": kind in kinds.SCALED_ROWS,
        "ONE_STEP": is_one and block_n == 4,  # wider blocks are for many inputs
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "CHUNK": int4_chunk(group) if kind in kinds.NIBBLES else 0,
    }


def gemv_up(x_TD: Tensor, packed: Packed, ids_TK: Tensor, skips: bool = False) -> Tensor:
    """act(gate) * up of every slot: [S, I] in the dtype of x, undefined for ids -1 with ``skips``.
    The activation is one of SWISH."""
    num_slots, top_k = ids_TK.numel(), ids_TK.shape[1]
    out = torch.empty(num_slots, packed.width, dtype=x_TD.dtype, device=x_TD.device)
    constants, none = _choice(packed, num_slots), nothing(torch.float32, x_TD.device)
    launch(
        gemv_up_kernel, (num_slots, cdiv(packed.num_out, constants["BLOCK_N"])),
        (x_TD, packed.data, none if packed.scale is None else packed.scale,
         none if packed.bias is None else packed.bias, out, ids_TK),
        (packed.num_out, packed.num_in, x_TD.stride(0), packed.group, top_k,
         int(packed.bias is not None), *SWISH[packed.act]),
        **constants, SKIPS=skips, num_warps=4,
    )  # fmt: skip
    return out


def gemv_down(
    h_SI: Tensor, packed: Packed, ids_TK: Tensor, weights_TK: Tensor, skips: bool = False
) -> Tensor:
    """Sum over a token's experts of weight * down(h): [T, D] in the dtype of h; with ``skips``
    without ids -1."""
    tokens, top_k = ids_TK.shape
    out = torch.empty(tokens, packed.num_out, dtype=h_SI.dtype, device=h_SI.device)
    constants, none = _choice(packed, tokens), nothing(torch.float32, h_SI.device)
    launch(
        gemv_down_kernel, (tokens, cdiv(packed.num_out, constants["BLOCK_N"])),
        (h_SI, packed.data, none if packed.scale is None else packed.scale,
         none if packed.bias is None else packed.bias, out, ids_TK, weights_TK),
        (packed.num_out, packed.num_in, packed.group, top_k, int(packed.bias is not None)),
        **constants, SKIPS=skips, num_warps=4,
    )  # fmt: skip
    return out
