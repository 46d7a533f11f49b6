"""Casts to narrow types in the interpreter, and e5m2 everywhere, against torch bit by bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from radixlm.kernels.triton.mode import cast, e4m3_bits, interpreting, runs_on


@triton.jit
def narrow_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, AS_BYTES: tl.constexpr = False):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size)
    if AS_BYTES:
        tl.store(out_ptr + at, e4m3_bits(x), mask=at < size)
    else:
        tl.store(out_ptr + at, cast(x, out_ptr.dtype.element_ty), mask=at < size)


def _numbers() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(1500, generator=g) * 2.0 ** torch.randint(-22, 8, (1500,), generator=g)
    halves = torch.arange(1, 400) / 64  # halfway between two 8-bit numbers
    return torch.cat((spread, halves, -halves, torch.tensor([0.0, 448.0, -448.0]))).clamp(-448, 448)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_numbers_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    x = _numbers()
    out = torch.zeros(len(x), dtype=dtype)
    narrow_kernel[(1,)](x, out, len(x), BLOCK=4096)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_bytes_of_e4m3_are_those_of_the_type() -> None:
    """The conversion of older GPUs, NaN and the smallest numbers included."""
    small = torch.arange(-40, 41) / 4096  # halfway between subnormal numbers
    x = torch.cat((_numbers(), small, torch.tensor([-0.0, torch.nan])))
    out = torch.zeros(len(x), dtype=torch.uint8)
    narrow_kernel[(1,)](x, out, len(x), BLOCK=4096, AS_BYTES=True)
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out[:-1], expected[:-1]) and int(out[-1]) & 127 == 127


def test_this_process_interprets() -> None:
    assert interpreting() and runs_on(torch.zeros(1))
