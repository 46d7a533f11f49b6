"""Quantized weights as 16 bit floats again, for products of many rows, and the end of a product of
integers. Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm import Packed, int4_chunk
from radixlm.kernels.triton.gemm_tile import load_dequantized
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import if_set, nothing

_OUTPUTS, _INPUTS = 32, 128  # of a program that widens
_COLUMNS = 1024  # of a program that scales


@triton.jit(do_not_specialize=["group", "is_paired"])
def dequantize_kernel(
    w_ptr, w_scale_ptr, out_ptr, num_out, num_in, group, is_paired,
    KIND: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (n, k): a tile of the weights of the first expert, row by row as they lie."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    at = start + tl.arange(0, BLOCK_K)
    near = tl.minimum(col, num_out - 1)
    first = tl.zeros((), tl.int64)
    w = load_dequantized(
        w_ptr, w_scale_ptr, first, near, start, num_out, num_in, group, is_paired, KIND, CHUNK,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SCALED:
        w *= tl.load(w_scale_ptr + near)[:, None]
    out_at = out_ptr + col.to(tl.int64)[:, None] * num_in + at[None, :]
    mask = (col < num_out)[:, None] & (at < num_in)[None, :]
    tl.store(out_at, w.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["has_bias"])
def scale_kernel(
    sums_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, num_out, has_bias, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, block): sums of integers times the scales of row and output, plus bias."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_out
    y = tl.load(sums_ptr + row * num_out + col, mask=mask, other=0).to(tl.float32)
    y *= tl.load(x_scale_ptr + row) * tl.load(w_scale_ptr + col, mask=mask, other=0.0)
    y += tl.load(bias_ptr + col, mask=if_set(has_bias, mask), other=0.0)
    tl.store(out_ptr + row * num_out + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def _inputs(kind: int) -> int:
    """Inputs of a program that widens; 4 bit weights stay within a group of any size."""
    return 32 if kind in kinds.NIBBLES else _INPUTS


def _constants(kind: int, group: int) -> dict[str, int | bool]:
    return {
        "KIND": kind,
        "SCALED": kind in kinds.SCALED_ROWS,
        "BLOCK_N": _OUTPUTS,
        "BLOCK_K": _inputs(kind),
        "CHUNK": int4_chunk(group) if kind in kinds.NIBBLES else 0,
    }


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Dense weights [N, K] in ``dtype``, gated ones still interleaved."""
    scale, shape = packed.scale, (packed.num_out, packed.num_in)
    out = torch.empty(shape, dtype=dtype, device=packed.data.device)
    grid = (cdiv(packed.num_out, _OUTPUTS), cdiv(packed.num_in, _inputs(packed.kind)))
    launch(
        dequantize_kernel, grid,
        (packed.data, scale, out),
        (packed.num_out, packed.num_in, packed.group, int(bool(packed.act))),
        **_constants(packed.kind, packed.group), num_warps=4,
    )  # fmt: skip
    return out


def scaled(sums_MN: Tensor, x_scale_M: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    """int32 sums of W8A8 as the product they stand for, [M, N]."""
    rows, num_out = sums_MN.shape
    out = torch.empty(rows, num_out, dtype=dtype, device=sums_MN.device)
    bias = packed.bias
    launch(
        scale_kernel, (rows, cdiv(num_out, _COLUMNS)),
        (sums_MN, x_scale_M, packed.scale,
         nothing(torch.float32, out.device) if bias is None else bias, out),
        (num_out, int(bias is not None)), BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
