"""How kernels run: compiled on a GPU, or interpreted on the CPU under ``TRITON_INTERPRET=1``.

In the interpreter ``tl.dot`` of bfloat16 is wrong, arithmetic of bfloat16 fails, bfloat16 is
truncated instead of rounded and 8-bit floats lose a carry. So kernels load, then
``.to(tl.float32)``, pass the operands of a dot through ``operand``, and narrow with ``cast``."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(IS_INTERPRETED)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of activations


def interpreting() -> bool:
    """Whether kernels of this process run on CPU tensors, statement by statement."""
    return IS_INTERPRETED


def runs_on(x: Tensor) -> bool:
    """Whether a kernel can take the tensor: on a GPU, or anywhere when interpreting."""
    return x.is_cuda or IS_INTERPRETED


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For a pointer that a kernel will not read. Types of pointers are compiled in: with one tensor
    in place of another a kernel would be compiled once more."""
    return torch.zeros(16, dtype=dtype, device=device)


@triton.jit
def if_set(flag, mask):
    """``mask`` where the number ``flag`` is not 0, else nowhere."""
    return tl.where(flag != 0, mask, False)


@triton.jit
def operand(x):
    """An operand of ``tl.dot``: float32 in the interpreter, as it is on a GPU."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 x as ``dtype``, rounded to nearest even everywhere; float8e5 on any GPU."""
    if dtype == tl.float8e5:
        # the upper half of a float16; Triton 3.6 has no other way before sm_89
        x = tl.where(tl.abs(x) < 6.103515625e-05, _in_steps(x, 192.0), _rounded(x, 21))
        bits = x.to(tl.float16).to(tl.uint16, bitcast=True) >> 8
        return bits.to(tl.uint8).to(dtype, bitcast=True)
    if INTERPRET:
        if dtype == tl.bfloat16:
            x = _rounded(x, 16)
        elif dtype == tl.float8e4nv:
            x = tl.where(tl.abs(x) < 0.015625, _in_steps(x, 24576.0), _rounded(x, 20))
    return x.to(dtype)


@triton.jit
def e4m3_bits(x):
    """float32 x, at most 448, as the byte of a float8e4nv: for GPUs without that type."""
    is_small = tl.abs(x) < 0.015625
    near = tl.abs(tl.where(is_small, _in_steps(x, 24576.0), _rounded(x, 20)))
    normal = (near.to(tl.int32, bitcast=True) >> 20) - 960  # its exponent has 120 less
    is_small = near < 0.015625  # still, after rounding
    bits = tl.where(is_small, tl.where(is_small, near * 512.0, 0.0).to(tl.int32), normal)
    bits = tl.where(x == x, bits, 127)
    return (bits | ((x.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def _rounded(x, BITS: tl.constexpr):
    """x without its last BITS bits."""
    bits = x.to(tl.int32, bitcast=True)
    bits += ((bits >> BITS) & 1) + ((1 << (BITS - 1)) - 1)
    bits = (bits >> BITS) << BITS
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _in_steps(x, large):
    """Small x as a multiple of the last digit of ``large``."""
    return (x + large) - large
