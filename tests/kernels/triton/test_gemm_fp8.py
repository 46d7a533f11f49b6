"""e4m3 in kernels against kernels/ops/fp8.py, and the guarantees of that module."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops import fp8, quantized
from radixlm.kernels.triton import gemm_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 1000), (2, 4500)])
def test_activations_are_rounded_as_the_reference_does(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape[0], shape[1] + 16)[:, : shape[1]].to(dtype) * 3
    x[0, :128] = 0
    for group, quantize in ((0, gemm_fp8.quantize_rows), (128, gemm_fp8.quantize_groups)):
        values, scale = quantize(x)
        want_values, want_scale = fp8.quantize_x(x, group)
        torch.testing.assert_close(scale.view(want_scale.shape), want_scale)
        steps = values.view(torch.uint8).int() - want_values.contiguous().view(torch.uint8).int()
        # 1 / scale may differ in its last bit, which may give the adjacent number
        assert int(steps.abs().max()) <= 1 and float((steps != 0).float().mean()) < 1e-2


def test_activations_as_integers() -> None:
    x = torch.randn(4, 300)
    values, scale = gemm_fp8.quantize_rows(x, torch.int8)
    want, want_scale = quantized.quantize_rows(x)
    torch.testing.assert_close(scale, want_scale[:, 0])
    assert float((values - want).abs().max()) <= 1
    assert gemm_fp8.quantize_rows(x[:0])[0].shape == (0, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["tensor", "rows", "power of two"])
def test_dequantized_checkpoints_quantize_back_to_the_same_numbers(
    scales: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    values = fp8.e4m3(torch.randn(64, 200) * 100)
    scale = {
        "tensor": torch.tensor(0.00321),
        "rows": torch.rand(64, 1) / 100 + 1e-4,
        "power of two": torch.tensor(2.0**-9),
    }[scales]
    wide = (values.float() * scale).to(dtype)
    got, got_scale = fp8.quantize_rows(wide)
    ratio = (got.float() * got_scale[:, None]) / (values.float() * scale)
    bound = 1e-5 if dtype == torch.float32 else 4e-3  # half a step of e4m3 is 3e-2
    assert float((ratio[values.float() != 0] - 1).abs().max()) < bound


@pytest.mark.parametrize("shape", [(256, 256), (200, 300), (1, 1)])
def test_blocks_of_any_shape(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values, scale = fp8.quantize_blocks(weight)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = values.float() * fp8.spread(scale, *shape)
    top = fp8.spread(scale, *shape) * fp8.FP8_MAX
    assert bool(((wide - weight).abs() <= weight.abs() / 16 + top * 2.0**-18).all())


def test_zeros_stay_zeros() -> None:
    for fmt in fp8.FORMATS:
        assert not fp8.fake_quantize_weight(torch.zeros(130, 130), fmt).any()
