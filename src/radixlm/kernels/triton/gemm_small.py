"""Products of at most 16 rows with 16 bit weights, the inputs split over programs.

A candidate against cuBLAS for shapes whose N * K is small: ``SPLITS`` lists those where it was
measured to win, and is empty as long as nothing was (``bench/gpu_gemm.py`` measures and prints the
lines). Parts are added in a fixed order. Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import operand
from radixlm.kernels.triton.variant import POINTERS, Variant

MAX_ROWS = 16
# (N, K) -> parts of K
SPLITS: dict[tuple[int, int], int] = {}
_ROWS = tl.constexpr(MAX_ROWS)
_BLOCK_N, _BLOCK_K = 32, 128
_SUM_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows"])
def split_kernel(
    x_ptr, w_ptr, part_ptr, num_rows, num_out, num_in, x_stride, part_in,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (n, part): the products of inputs [part * part_in, (part + 1) * part_in)."""
    row = tl.arange(0, _ROWS)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    first = part * part_in
    last = tl.minimum(first + part_in, num_in)
    near = tl.minimum(col, num_out - 1).to(tl.int64)
    acc = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (row < num_rows)[:, None] & (k < last)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        w_at = w_ptr + near[None, :] * num_in + k[:, None]
        w = tl.load(w_at, mask=(k < last)[:, None], other=0.0)
        acc = tl.dot(operand(x), operand(w), acc, input_precision="ieee")
    at = part_ptr + (part * num_rows + row)[:, None] * num_out + col[None, :]
    tl.store(at, acc, mask=(row < num_rows)[:, None] & (col < num_out)[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def sum_kernel(
    part_ptr, bias_ptr, out_ptr, num_rows, num_out, num_parts, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the sum of the parts, in their order, plus bias."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_out
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(part_ptr + (part * num_rows + row) * num_out + col, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_out + col, total.to(out_ptr.dtype.element_ty), mask=mask)


def skinny(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, splits: int) -> Tensor:
    """x W^T + bias of at most 16 rows, [M, N]."""
    rows, num_in = x_MK.shape
    num_out = weight_NK.shape[0]
    part_in = cdiv(cdiv(num_in, splits), _BLOCK_K) * _BLOCK_K
    splits = cdiv(num_in, part_in)
    parts = torch.empty(splits, rows, num_out, dtype=torch.float32, device=x_MK.device)
    out = torch.empty(rows, num_out, dtype=x_MK.dtype, device=x_MK.device)
    launch(
        split_kernel, (cdiv(num_out, _BLOCK_N), splits),
        (x_MK, weight_NK, parts), (rows, num_out, num_in, x_MK.stride(0), part_in),
        BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=4,
    )  # fmt: skip
    launch(
        sum_kernel, (rows, cdiv(num_out, _SUM_BLOCK)),
        (parts, out if bias_N is None else bias_N, out), (rows, num_out, splits),
        HAS_BIAS=bias_N is not None, BLOCK=_SUM_BLOCK, num_warps=2,
    )  # fmt: skip
    return out


def variants() -> tuple[Variant, ...]:
    """Both kernels for each dtype."""
    found = []
    for pointer in POINTERS.values():
        pointers = {"x_ptr": pointer, "w_ptr": pointer, "out_ptr": pointer, "bias_ptr": pointer}
        sizes = dict.fromkeys(("num_out", "num_in", "x_stride", "part_in"), "i32:16")
        counts = dict.fromkeys(("num_rows", "num_parts"), "i32")
        types = {**pointers, "part_ptr": "*fp32", **sizes, **counts}
        for kernel, constants, warps in (
            (split_kernel, {"BLOCK_N": _BLOCK_N, "BLOCK_K": _BLOCK_K}, 4),
            (sum_kernel, {"HAS_BIAS": True, "BLOCK": _SUM_BLOCK}, 2),
        ):
            own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            name = f"{kernel.fn.__name__.removesuffix('_kernel')}-{pointer}"
            found.append(Variant(name, kernel, own, constants, warps, 4))
    return tuple(found)
