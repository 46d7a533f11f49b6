"""Activation and embedding kernels against their references."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops import activation as reference
from radixlm.kernels.ops.embedding import embedding as reference_embedding
from radixlm.kernels.triton import activation
from radixlm.kernels.triton.embedding import embedding

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SPECIAL = [0.0, -0.0, 1e-8, -1e-4, 0.0999, 0.1001, 30.0, -30.0, 200.0, float("nan")]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(dtype)


def close(a: torch.Tensor, b: torch.Tensor, times: float = 1.0) -> None:
    limit = TOLERANCE[a.dtype] * times
    torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("act", list(reference.POINTWISE))
def test_activations(act: str, dtype: torch.dtype) -> None:
    x = numbers((3, 1100), dtype)
    close(activation.activate(x, act), reference.activate(x, act))
    finite = numbers((5, 70), dtype)[1:]
    close(activation.activate_gated(finite, act), reference.activate_gated(finite, act), 4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_clamped_gate_sigmoid_and_cap(dtype: torch.dtype) -> None:
    x = numbers((4, 6, 50), dtype)
    close(activation.activate_gated(x, "swiglu_oai"), reference.activate_gated(x, "swiglu_oai"), 4)
    close(activation.sigmoid(x[..., ::2]), reference.sigmoid(x[..., ::2]))
    close(activation.softcap(x, 30.0), reference.softcap(x, 30.0), 8)


def test_small_numbers_stay_precise_through_tanh() -> None:
    x = torch.logspace(-12, 0, 400).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(400)
    torch.testing.assert_close(activation.activate(x, "tanh"), x.tanh(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scale", [1.0, 55.4256])
def test_rows_of_a_table(dtype: torch.dtype, scale: float) -> None:
    table = numbers((20, 1030), torch.bfloat16)
    table[0] = 0  # infinities and NaN
    ids = torch.tensor([3, 19, 0, 3])
    for given in (ids, ids.int()):
        got = embedding(given, table, scale, dtype)
        assert torch.equal(got, reference_embedding(ids, table, scale, dtype))
