"""RMS and layer norm, with the residual's sum before them. A program takes a few whole rows, so a
row's numbers do not depend on its neighbours.

Legend: N rows, D channels.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import FLOATS, cast, runs_on

MAX_DIM = 16384
_TILE = 1024  # channels that a program takes at least, in rows of few channels


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, dim, num_weights,
    x_stride, delta_stride, out_stride, eps,
    HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x += delta``, then the norm of x into out. Row n has weights n % num_weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < dim)
    wide_row = row.to(tl.int64)
    at = x_ptr + wide_row * x_stride + col
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + wide_row * delta_stride + col, mask=mask, other=0.0).to(tl.float32)
        rounded = cast(x, x_ptr.dtype.element_ty)
        tl.store(at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(x, 1)[:, None] / dim
        x = tl.where(mask, x - mean, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1)[:, None] / dim + eps)
    weight_at = (row % num_weights) * dim + col
    x = x * scale * tl.load(weight_ptr + weight_at, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + weight_at, mask=mask, other=0.0)
    tl.store(out_ptr + wide_row * out_stride + col, cast(x, out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _tile(dim: int) -> tuple[int, int, int]:
    """Rows and channels of a program, and its warps."""
    block = max(64, next_power_of_2(dim))
    return max(1, _TILE // block), block, min(32, max(4, block // 512))


def as_rows(x: Tensor) -> Tensor | None:
    """x [..., D] as rows [N, D] that share its memory; None where their distances differ."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    if x.ndim == 2:
        return x
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else None


def takes(x: Tensor, weight_D: Tensor, bias_D: Tensor | None = None) -> bool:
    """Whether the kernel can normalise x."""
    return (
        runs_on(x)
        and x.dtype in FLOATS
        and 0 < x.shape[-1] <= MAX_DIM
        and x.numel() > 0
        and as_rows(x) is not None
        and weight_D.is_contiguous()
        and weight_D.dtype == torch.float32
        and (bias_D is None or bias_D.dtype == torch.float32)
    )


def norm_into(
    x_ND: Tensor,
    out_ND: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    is_layer_norm: bool,
    delta_ND: Tensor | None = None,
) -> None:
    """Normalise rows of x into ``out``, which may be x itself; ``delta`` first joins x in place.
    weight and bias: float32 [D] or [H, D], the latter for rows n % H."""
    num_rows, dim = x_ND.shape
    rows, block, num_warps = _tile(dim)
    launch(
        norm_kernel, (cdiv(num_rows, rows),),
        (x_ND, x_ND if delta_ND is None else delta_ND, weight_D,
         weight_D if bias_D is None else bias_D, out_ND),
        (num_rows, dim, weight_D.numel() // dim, x_ND.stride(0),
         0 if delta_ND is None else delta_ND.stride(0), out_ND.stride(0), eps),
        HAS_DELTA=delta_ND is not None, HAS_BIAS=bias_D is not None, IS_LAYER=is_layer_norm,
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def norm(
    x: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    is_layer_norm: bool,
    delta: Tensor | None = None,
) -> Tensor:
    """The norm of x [..., D] as a new contiguous tensor."""
    rows_ND = as_rows(x)
    assert rows_ND is not None, "takes() comes first"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    delta_ND = None
    if delta is not None:
        delta_ND = as_rows(delta)
        if delta_ND is None:
            delta_ND = delta.reshape(-1, x.shape[-1])
    out_ND = out if out.ndim == 2 else out.view(rows_ND.shape)
    norm_into(rows_ND, out_ND, weight_D, bias_D, eps, is_layer_norm, delta_ND)
    return out
