"""Experts for a few tokens: each weight is read once by a program that multiplies it with one row.
No sorting, no padding; weights of every kind, activations as they are.

Legend: T tokens, K chosen experts, S = T * K slots, D channels, I inner channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.activation import gated
from radixlm.kernels.triton.gemm import Packed, int4_chunk, signature
from radixlm.kernels.triton.gemm_tile import ACTS, unpacked
from radixlm.kernels.triton.mode import interpreting
from radixlm.kernels.triton.variant import POINTERS, Variant

_SIZE = 4096  # numbers of a step
STAGES = tl.constexpr(3)  # steps whose weights are on their way
_BUSY = 264  # programs that keep a GPU of 132 SMs busy


@triton.jit
def _products(
    x_at, w_ptr, w_scale_ptr, expert, col, num_out, num_in,
    KIND: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, SCALED: tl.constexpr,
    ONE_STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of x with outputs ``col`` of an expert: float32 [BLOCK_N], scaled."""
    near = tl.minimum(col, num_out - 1)
    k = tl.arange(0, BLOCK_K)
    if ONE_STEP:
        x = tl.load(x_at + k, mask=k < num_in, other=0.0).to(tl.float32)[None, :]
        acc = x * unpacked(
            w_ptr, w_scale_ptr, expert, near, 0, num_out, num_in, KIND, GROUP, PAIRED, CHUNK,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.range(0, num_in, BLOCK_K, num_stages=STAGES):
            at = start + k
            x = tl.load(x_at + at, mask=at < num_in, other=0.0).to(tl.float32)[None, :]
            acc += x * unpacked(
                w_ptr, w_scale_ptr, expert, near, start, num_out, num_in, KIND, GROUP, PAIRED,
                CHUNK, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    y = tl.sum(acc, 1)
    if SCALED:
        y *= tl.load(w_scale_ptr + expert * num_out + near)
    return y


@triton.jit
def gemv_up_kernel(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, ids_ptr, num_out, num_in, x_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (slot, block): act(gate) * up of one token through one of its experts."""
    slot = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    y = _products(
        x_ptr + slot // TOP_K * x_stride, w_ptr, w_scale_ptr, expert, col, num_out, num_in,
        KIND, GROUP, True, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias_ptr + expert * num_out + tl.minimum(col, num_out - 1))
    gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
    out = gated(gate, up, ACT - 1).to(out_ptr.dtype.element_ty)
    half = num_out // 2
    at = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + slot * half + at, out, mask=at < half)


@triton.jit
def gemv_down_kernel(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, ids_ptr, row_weight_ptr, num_out, num_in,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, ONE_STEP: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the weighted sum over the token's experts, in their order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.range(TOP_K, num_stages=STAGES):
        slot = token * TOP_K + choice
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        y = _products(
            x_ptr + slot * num_in, w_ptr, w_scale_ptr, expert, col, num_out, num_in,
            KIND, GROUP, False, SCALED, ONE_STEP, BLOCK_N, BLOCK_K, CHUNK,
        )  # fmt: skip
        if HAS_BIAS:
            y += tl.load(bias_ptr + expert * num_out + tl.minimum(col, num_out - 1))
        total += y * tl.load(row_weight_ptr + slot)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_out + col, out, mask=col < num_out)


def _blocks(kind: int, rows: int, num_out: int) -> tuple[int, int]:
    """Outputs and inputs of a step: few outputs where there are few rows, to use every SM."""
    if kind == kinds.INT4:  # bytes of neighbouring outputs lie side by side; within any group
        return 64, 32
    if interpreting():  # a program costs much there, its size little
        return 64, 256
    block = next((n for n in (16, 8) if rows * num_out >= n * _BUSY), 4)
    return block, _SIZE // block


def gemv_up(x_TD: Tensor, packed: Packed, ids_TK: Tensor) -> Tensor:
    """act(gate) * up of every slot: [S, I] in the dtype of x."""
    num_slots, top_k = ids_TK.numel(), ids_TK.shape[1]
    out = torch.empty(num_slots, packed.width, dtype=x_TD.dtype, device=x_TD.device)
    block_n, block_k = _blocks(packed.kind, num_slots, packed.num_out)
    gemv_up_kernel[(num_slots, triton.cdiv(packed.num_out, block_n))](
        x_TD, packed.data, out if packed.scale is None else packed.scale,
        out if packed.bias is None else packed.bias, out, ids_TK, packed.num_out, packed.num_in,
        x_TD.stride(0), KIND=packed.kind, GROUP=packed.group,
        SCALED=packed.kind in kinds.SCALED_ROWS, ONE_STEP=packed.num_in <= block_k, TOP_K=top_k,
        HAS_BIAS=packed.bias is not None, ACT=ACTS[packed.act], BLOCK_N=block_n, BLOCK_K=block_k,
        CHUNK=int4_chunk(packed.group), num_warps=4,
    )  # fmt: skip
    return out


def gemv_down(h_SI: Tensor, packed: Packed, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum over a token's experts of weight * down(h): [T, D] in the dtype of h."""
    tokens, top_k = ids_TK.shape
    out = torch.empty(tokens, packed.num_out, dtype=h_SI.dtype, device=h_SI.device)
    block_n, block_k = _blocks(packed.kind, tokens, packed.num_out)
    gemv_down_kernel[(tokens, triton.cdiv(packed.num_out, block_n))](
        h_SI, packed.data, out if packed.scale is None else packed.scale,
        out if packed.bias is None else packed.bias, out, ids_TK, weights_TK, packed.num_out,
        packed.num_in, KIND=packed.kind, GROUP=packed.group,
        SCALED=packed.kind in kinds.SCALED_ROWS, ONE_STEP=packed.num_in <= block_k, TOP_K=top_k,
        HAS_BIAS=packed.bias is not None, BLOCK_N=block_n, BLOCK_K=block_k,
        CHUNK=int4_chunk(packed.group), num_warps=4,
    )  # fmt: skip
    return out


def variants() -> tuple[Variant, ...]:
    """Every kind, block and dtype."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for kind in range(kinds.FP8_BLOCK_WIDE + 1):
        for pointer in POINTERS.values():
            for group in (32, 64, 128) if kind == kinds.INT4 else (0,):
                blocks = {_blocks(kind, 1, num_out) for num_out in (1024, 2560, 65536)}
                for block in sorted(blocks):
                    for is_one in (False, True):
                        yield from _uses(kind, group, pointer, is_one, *block)


def _uses(
    kind: int, group: int, pointer: str, is_one_step: bool, block_n: int, block_k: int
) -> Iterator[Variant]:
    if kind == kinds.INT4 and is_one_step:
        return
    types = signature(kind, pointer) | {"x_ptr": pointer, "ids_ptr": "*i64"}
    for use, kernel in {"up": gemv_up_kernel, "down": gemv_down_kernel}.items():
        constants = {
            "KIND": kind,
            "GROUP": group,
            "SCALED": kind in kinds.SCALED_ROWS,
            "ONE_STEP": is_one_step,
            "TOP_K": 8,
            "HAS_BIAS": use == "up",
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "CHUNK": int4_chunk(group),
        }
        yield Variant(
            f"gemv-{use}-{kind}-{group}-{pointer}-{block_n}x{block_k}{'-one' * is_one_step}",
            kernel,
            {name: kind for name, kind in types.items() if name in kernel.arg_names},
            constants | ({"ACT": 1} if use == "up" else {}),
            4,
            3,
            min_arch=89 if kind in (kinds.FP8, kinds.FP8_BLOCK) else 80,
        )
