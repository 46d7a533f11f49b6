"""Linear layers on the GPU against the reference of the same format, few rows and many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops import linear as reference
from radixlm.kernels.ops.fp8 import fake_quantize_x
from radixlm.kernels.triton import linear
from radixlm.kernels.triton.gemm_fp8 import quantize_rows

FORMATS = ["", "int8wo", "w8a8", "int4-32", "w4a8-64", "fp8", "fp8-128"]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def bound(fmt: str, dtype: torch.dtype) -> float:
    if fmt.startswith("w4a8"):
        return 0.02  # the reference rounds activations too
    if fmt in ("w8a8", "fp8", "fp8-128"):
        return 0.01  # one value may round to the other side
    return 1e-5 if dtype == torch.float32 else 1e-2


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(fmt, torch.float32) for fmt in FORMATS] + [("", torch.bfloat16), ("fp8", torch.bfloat16)],
)
def test_equals_the_reference(fmt: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, bias = (torch.randn(112, 128) / 8).to(dtype), torch.randn(112)
    got, want = linear.pack_linear(weight, bias, fmt), reference.pack_linear(weight, bias, fmt)
    for shape in ((70, 128), (2, 2, 128)):
        x = torch.randn(shape).to(dtype)
        y = got.run(x)
        assert y.shape == (*shape[:-1], 112) and y.dtype == dtype
        assert error(y, want.run(x)) < bound(fmt, dtype)
    assert error(got.unpack(), want.unpack()) < 1e-2 and got.unpack().dtype == dtype


@pytest.mark.parametrize("fmt", FORMATS)
def test_gated(fmt: str) -> None:
    torch.manual_seed(2)
    act = "gelu_tanh"
    weight = torch.randn(256, 128) / 8
    got = linear.pack_gated(weight, None, fmt, act)
    want = reference.pack_gated(weight, None, fmt, act)
    assert got.out_features == 128
    for rows in (2, 70):
        x = torch.randn(rows, 128)
        assert error(got.run(x), want.run(x)) < 2 * bound(fmt, torch.float32)
    assert error(got.unpack(), want.unpack()) < 1e-2


@pytest.mark.parametrize("fmt", ["", "int8wo", "int4-32"])
def test_tied_tables(fmt: str) -> None:
    torch.manual_seed(3)
    table = torch.randn(96, 64)
    got, want = linear.pack_tied(table, fmt), reference.pack_tied(table, fmt)
    ids, x = torch.tensor([0, 95, 4]), torch.randn(2, 64)
    assert error(got.rows(ids, 8.0, torch.float32), want.rows(ids, 8.0, torch.float32)) < 1e-6
    assert error(got.run(x), want.run(x)) < 1e-5


def test_packing_keeps_no_reference_to_borrowed_memory() -> None:
    weight = torch.randn(32, 32)
    packed = linear.pack_linear(weight, None, "")
    want = packed.run(weight)
    weight_then = weight.clone()
    weight.zero_()
    assert torch.equal(packed.run(weight_then), want)


def test_torchs_row_scaled_product() -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(64, 128).bfloat16(), torch.randn(80, 128).bfloat16()
    packed = linear.pack_linear(weight, None, "fp8")
    assert isinstance(packed, linear.QuantizedLinear)
    values, scale = quantize_rows(x)
    got = linear.by_rows(values, scale, packed.packed, torch.ones(64).bfloat16())
    want = fake_quantize_x(x) @ packed.unpack().float().T + 1
    assert error(got, want) < 1e-2


def test_these_ops_are_found_by_name() -> None:
    kernels = bind("cpu", {"all": "triton"})
    for op in ("pack_linear", "pack_gated", "pack_tied", "route", "pack_experts"):
        assert kernels.chosen[op] == "triton"
    assert kernels.copies_weights
