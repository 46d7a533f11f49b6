"""Products of every kind of packed weights against their dequantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixlm.kernels.ops import activation, fp8
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm import Packed, product
from radixlm.kernels.triton.gemm_fp8 import quantize_groups, quantize_rows
from radixlm.kernels.triton.gemm_pack import dequantize, pack

FORMATS = ["", "int8wo", "w8a8", "int4-32", "int4-64", "int4-128", "fp8", "fp8-128"]
WIDE = {kinds.FP8: kinds.FP8_WIDE, kinds.FP8_BLOCK: kinds.FP8_BLOCK_WIDE}


def as_wide(packed: Packed) -> Packed:
    """The same e4m3 weights for a GPU without e4m3."""
    return Packed(
        WIDE[packed.kind], packed.data.view(torch.uint8), packed.scale, packed.bias,
        packed.num_out, packed.num_in, packed.act,
    )  # fmt: skip


def run(x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """(the kernel's product, x as the kernel rounds it)."""
    if packed.kind == kinds.W8A8:
        values, scale = quantize_rows(x, torch.int8)
    elif packed.kind == kinds.FP8:
        values, scale = quantize_rows(x)
    elif packed.kind == kinds.FP8_BLOCK:
        values, scale = quantize_groups(x)
        wide = values.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]
        return product(values, packed, scale, x.dtype), wide
    else:
        return product(x, packed, None, x.dtype), x.float()
    return product(values, packed, scale, x.dtype), values.float() * scale[:, None]


def check(x: Tensor, weight: Tensor, bias: Tensor | None, fmt: str, act: str, wide: bool) -> None:
    packed = pack(weight[None], None if bias is None else bias[None], fmt, act)
    packed = as_wide(packed) if wide else packed
    got, seen = run(x, packed)
    want = seen @ dequantize(packed)[0].T
    if bias is not None:
        want += bias
    want = activation.activate_gated(want, act) if act else want
    bound = 2e-5 if x.dtype == torch.float32 else 2e-3 if x.dtype == torch.float16 else 1e-2
    assert got.dtype == x.dtype and got.shape == want.shape
    assert float((got.float() - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [17, 70])
def test_ragged_shapes(fmt: str, rows: int) -> None:
    torch.manual_seed(rows)
    num_in = 192 if "-" in fmt and fmt != "int4-128" and fmt != "fp8-128" else 256
    num_in = 200 if fmt in ("", "int8wo", "w8a8", "fp8", "fp8-128") and rows == 17 else num_in
    x, weight = torch.randn(rows, num_in), torch.randn(70, num_in)
    check(x, weight, torch.randn(70) if rows == 17 else None, fmt, "", False)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(fmt, torch.bfloat16) for fmt in FORMATS if not fmt.startswith("int4-")]
    + [("int4-64", torch.bfloat16), ("", torch.float16)],
)
def test_gated_with_bias_in_16_bits(fmt: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(3, 256).to(dtype), (torch.randn(76, 256) / 8).to(dtype)
    check(x, weight, torch.randn(76), fmt, "silu", False)


@pytest.mark.parametrize("fmt", ["fp8", "fp8-128"])
@pytest.mark.parametrize("act", ["", "silu"])
def test_fp8_where_the_gpu_has_none(fmt: str, act: str) -> None:
    torch.manual_seed(6)
    check(torch.randn(5, 256), torch.randn(144, 256), None, fmt, act, True)


@pytest.mark.parametrize("act", ["relu2", "gelu", "swiglu_oai"])  # others: test_activation
def test_activations(act: str) -> None:
    torch.manual_seed(7)
    check(torch.randn(4, 64), torch.randn(64, 64), None, "", act, False)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("act", ["", "gelu"])
def test_packing_keeps_the_weights(fmt: str, act: str) -> None:
    torch.manual_seed(8)
    weight = torch.randn(2, 140, 128)
    error = (dequantize(pack(weight, None, fmt, act)) - weight).norm() / weight.norm()
    bound = {"": 0, "int4-32": 0.1, "int4-64": 0.12, "int4-128": 0.13}.get(fmt, 0.03)
    assert float(error) <= bound
    if fmt == "fp8":
        rows = torch.stack([fp8.fake_quantize_weight(part, fmt) for part in weight])
        torch.testing.assert_close(dequantize(pack(weight, None, fmt, act)), rows)
