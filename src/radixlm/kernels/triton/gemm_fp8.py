"""Activations and weights in e4m3 for ``gemm_tile``. Formats: see kernels/ops/fp8.py.

Legend: M rows, N outputs, K inputs, E experts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops import fp8 as reference
from radixlm.kernels.triton.gemm_tile import FP8_GROUP
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import INTERPRET, interpreting

_NATIVE_SINCE = (8, 9)  # compute capability


@functools.cache
def is_native(device: torch.device) -> bool:
    """Whether the device multiplies e4m3; others dequantize the weights and do not round x."""
    return interpreting() or torch.cuda.get_device_capability(device) >= _NATIVE_SINCE


@triton.jit
def _rounded(x, MAX_VALUE: tl.constexpr):
    """x rounded to integers for int8. For e4m3 x itself; only in the interpreter, whose cast loses
    the carry into the exponent, rounded to 4 significant bits first."""
    if MAX_VALUE == 127.0:
        x = tl.floor(x + 0.5)
    elif INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        x = tl.where(tl.abs(x) < 0.015625, x, even.to(tl.float32, bitcast=True))
    return x


@triton.jit
def quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, num_in, x_stride, MAX_VALUE: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """A program quantizes one row in two passes: to e4m3, or to int8 if MAX_VALUE is 127."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_in, BLOCK):
        at = x_ptr + row * x_stride + start + col
        x = tl.load(at, mask=start + col < num_in, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.max(top, 0) / MAX_VALUE
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))
    tl.store(scale_ptr + row, scale)
    for start in range(0, num_in, BLOCK):
        at = x_ptr + row * x_stride + start + col
        x = tl.load(at, mask=start + col < num_in, other=0.0).to(tl.float32) * inverse
        x = tl.minimum(tl.maximum(x, -MAX_VALUE), MAX_VALUE)
        tl.store(
            out_ptr + row * num_in + start + col,
            _rounded(x, MAX_VALUE).to(out_ptr.dtype.element_ty),
            mask=start + col < num_in,
        )


@triton.jit
def quantize_groups_kernel(
    x_ptr, out_ptr, scale_ptr, num_in, x_stride, MAX_VALUE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A program quantizes GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = col < num_in
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / MAX_VALUE
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))
    num_groups = (num_in + GROUP - 1) // GROUP
    tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
    x = tl.minimum(tl.maximum(x * inverse[:, None], -MAX_VALUE), MAX_VALUE)
    x = _rounded(x, MAX_VALUE)
    tl.store(out_ptr + row * num_in + col, x.to(out_ptr.dtype.element_ty), mask=mask)


def _row_block(num_in: int) -> tuple[int, int]:
    """Channels of a step of a row's program, and its warps."""
    block = min(4096, max(128, next_power_of_2(num_in)))
    return block, min(8, max(1, block // 256))


def quantize_rows(x_MK: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """(x in ``dtype`` e4m3 or int8 [M, K], float32 scale [M])."""
    rows, num_in = x_MK.shape
    out = torch.empty(rows, num_in, dtype=dtype, device=x_MK.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x_MK.device)
    block, num_warps = _row_block(num_in)
    if rows:
        launch(
            quantize_rows_kernel, (rows,),
            (x_MK, out, scale), (num_in, x_MK.stride(0)),
            MAX_VALUE=127.0 if dtype == torch.int8 else reference.FP8_MAX, BLOCK=block,
            num_warps=num_warps,
        )  # fmt: skip
    return out, scale


def quantize_groups(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], float32 scale [M, ceil(K / 128)])."""
    rows, num_in = x_MK.shape
    num_groups = cdiv(num_in, FP8_GROUP)
    out = torch.empty(rows, num_in, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale = torch.empty(rows, num_groups, dtype=torch.float32, device=x_MK.device)
    if rows:
        launch(
            quantize_groups_kernel, (rows, cdiv(num_groups, _GROUPS)),
            (x_MK, out, scale), (num_in, x_MK.stride(0)),
            MAX_VALUE=reference.FP8_MAX, GROUPS=_GROUPS, GROUP=FP8_GROUP, num_warps=4,
        )  # fmt: skip
    return out, scale


_GROUPS = 8


def quantize_experts(weight_ENK: Tensor, is_block: bool, halves: int) -> tuple[Tensor, Tensor]:
    """(e4m3 [E, N, K], scale [E, N] or, by blocks of each half, [E, rows, ceil(K / 128)])."""
    values = torch.empty(weight_ENK.shape, dtype=torch.float8_e4m3fn, device=weight_ENK.device)
    scales = []
    for weight_NK, value_NK in zip(weight_ENK, values, strict=True):
        if is_block:
            parts = [reference.quantize_blocks(part) for part in weight_NK.chunk(halves)]
            value_NK.copy_(torch.cat([part[0].view(torch.uint8) for part in parts]).view(
                torch.float8_e4m3fn
            ))  # fmt: skip
            scales.append(torch.cat([part[1] for part in parts]))
        else:
            value, scale = reference.quantize_rows(weight_NK)
            value_NK.copy_(value)
            scales.append(scale)
    return values, torch.stack(scales)
