"""Activations, alone or gated, and a cap on logits. Legend: T tokens, I inner channels."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops import activation as reference
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import FLOATS, cast, runs_on

CODES = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "gelu_quick": 3,
    "relu": 4,
    "relu2": 5,
    "tanh": 6,
    "sigmoid": 7,
    "swiglu_oai": 8,
}
# x * sigmoid(alpha x) * (up + shift), x and up within a limit: (limit, alpha, shift). A product can
# end with any of them; with the other activations it is followed by a kernel.
SWISH = {
    "silu": (math.inf, 1.0, 0.0),
    "gelu_quick": (math.inf, 1.702, 0.0),
    "swiglu_oai": (reference.OAI_LIMIT, reference.OAI_ALPHA, 1.0),
}
_BLOCK = 1024
_OAI_LIMIT = tl.constexpr(reference.OAI_LIMIT)
_OAI_ALPHA = tl.constexpr(reference.OAI_ALPHA)


@triton.jit
def tanh(x):
    """Of float32, to one or two units in the last place."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    series = 1.0 + square * (-0.33333333 + square * (0.13333333 + square * -0.05396825))
    return tl.where(tl.abs(x) < 0.1, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _curve(x, ACT: tl.constexpr):
    if ACT == 0:
        y = x * tl.sigmoid(x)
    elif ACT == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == 3:
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == 4:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == 5:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = y * y
    elif ACT == 6:
        y = tanh(x)
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """``act(gate) * up`` of float32."""
    if ACT == 8:
        gate = tl.minimum(gate, _OAI_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -_OAI_LIMIT, _OAI_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = (up + 1.0) * gate * tl.sigmoid(gate * _OAI_ALPHA)
    else:
        y = _curve(gate, ACT) * up
    return y


@triton.jit
def swish_gated(gate, up, limit, alpha, shift):
    """``act(gate) * up`` of float32 for an activation of SWISH."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate * alpha) * (up + shift)


@triton.jit(do_not_specialize=["size"])
def pointwise_kernel(
    x_ptr, out_ptr, size, inner, outer, ACT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """``outer * act(x * inner)``; the factors count if SCALED."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x = x / inner
    y = _curve(x, ACT)
    if SCALED:
        y = y * outer
    tl.store(out_ptr + at, cast(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_kernel(x_ptr, out_ptr, half, x_stride, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """``act(gate) * up``; program (t, i): a block of channels of token t."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < half
    gate = tl.load(x_ptr + token * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + half + col, mask=mask, other=0.0).to(tl.float32)
    y = gated(gate, up, ACT)
    tl.store(out_ptr + token * half + col, cast(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_pairs_kernel(x_ptr, out_ptr, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block): act(gate) * up of interleaved pairs."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    x = tl.load(x_ptr + row * 2 * width + both, mask=both < 2 * width, other=0.0)
    gate, up = tl.split(x.to(tl.float32))
    y = cast(gated(gate, up, ACT), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + pair, y, mask=pair < width)


def _takes(x: Tensor) -> bool:
    return runs_on(x) and x.dtype in FLOATS and x.numel() > 0


def _pointwise(x: Tensor, act: str, cap: float | None = None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    factor = 1.0 if cap is None else cap
    launch(
        pointwise_kernel, (cdiv(x.numel(), _BLOCK),),
        (x, out), (x.numel(), factor, factor), ACT=CODES[act], SCALED=cap is not None, BLOCK=_BLOCK
    )  # fmt: skip
    return out


def sigmoid(x: Tensor) -> Tensor:
    """See kernels/ops/activation.py."""
    return _pointwise(x, "sigmoid") if _takes(x) else reference.sigmoid(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See kernels/ops/activation.py."""
    return _pointwise(x, "tanh", cap) if _takes(x) else reference.softcap(x, cap)


def activate(x_TI: Tensor, act: str) -> Tensor:
    """See kernels/ops/activation.py."""
    if not _takes(x_TI) or act not in reference.POINTWISE:
        return reference.activate(x_TI, act)
    return _pointwise(x_TI, act)


def activate_gated(x_T2I: Tensor, act: str, limit: float = 0.0, cuts_after: bool = False) -> Tensor:
    """See kernels/ops/activation.py."""
    if limit or not _takes(x_T2I) or act not in CODES or x_T2I.shape[-1] % 2:
        return reference.activate_gated(x_T2I, act, limit, cuts_after)
    if x_T2I.ndim != 2 or x_T2I.stride(1) != 1:
        x_T2I = x_T2I.contiguous()
    rows = x_T2I if x_T2I.ndim == 2 else x_T2I.view(-1, x_T2I.shape[-1])
    tokens, half = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(tokens, half, dtype=x_T2I.dtype, device=x_T2I.device)
    launch(
        gated_kernel, (tokens, cdiv(half, _BLOCK)),
        (rows, out), (half, rows.stride(0)), ACT=CODES[act], BLOCK=_BLOCK
    )  # fmt: skip
    return out.view(*x_T2I.shape[:-1], half)


def gated_pairs(x: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """act(gate) * up of rows [N, 2I] whose gate and up are interleaved: [N, I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        launch(
            gated_pairs_kernel, (rows, cdiv(width, _BLOCK)),
            (x, out), (width,), ACT=CODES[act], BLOCK=_BLOCK, num_warps=4
        )  # fmt: skip
    return out
