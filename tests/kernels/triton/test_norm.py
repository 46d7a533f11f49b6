"""Norm kernels against their references: dtypes, odd widths, views, weights for each head."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops import norm as reference
from radixlm.kernels.triton import ops

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 64), (3, 100), (5, 1024), (2, 2100), (17, 3, 40)]


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    limit = TOLERANCE[a.dtype]
    torch.testing.assert_close(a, b, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_match_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = (
        rows(shape, dtype),
        rows(shape[-1:], torch.float32, 1),
        rows(shape[-1:], torch.float32, 2),
    )
    close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    close(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    close(ops.layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_residual_is_summed_in_place_bit_for_bit(dtype: torch.dtype, kind: str) -> None:
    x, delta = rows((7, 200), dtype), rows((7, 200), dtype, 1)
    weight = rows((200,), torch.float32, 2)
    same = x.clone()
    if kind == "rms":
        got, wanted = (
            m.add_rms_norm(a, delta, weight, 1e-6) for m, a in ((ops, x), (reference, same))
        )
    else:
        got, wanted = (
            m.add_layer_norm(a, delta, weight, weight, 1e-6)
            for m, a in ((ops, x), (reference, same))
        )
    assert torch.equal(x, same)
    close(got, wanted)


def test_each_head_may_have_its_own_weights() -> None:
    x, weight = rows((6, 5, 32), torch.float32), rows((5, 32), torch.float32, 1)
    close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_strided_rows_and_unsupported_inputs() -> None:
    joined, weight = rows((4, 300), torch.float32), rows((100,), torch.float32, 1)
    view = joined[:, 100:200]
    close(ops.rms_norm(view, weight, 1e-6), reference.rms_norm(view, weight, 1e-6))
    x, delta = view.clone(), rows((4, 100), torch.float32, 3)
    close(
        ops.add_rms_norm(view, delta, weight, 1e-6),
        reference.add_rms_norm(x, delta, weight, 1e-6),
    )
    assert torch.equal(view, x) and torch.equal(
        joined[:, :100], rows((4, 300), torch.float32)[:, :100]
    )
    for odd in (view.double(), joined[:, :200:2], joined[:0, :100]):
        assert torch.equal(ops.rms_norm(odd, weight, 1e-6), reference.rms_norm(odd, weight, 1e-6))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = rows((64, 48), torch.float16), rows((48,), torch.float32, 1)
    whole = ops.rms_norm(x, weight, 1e-6)
    assert all(
        torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-6)[0], whole[i]) for i in (0, 17, 63)
    )
