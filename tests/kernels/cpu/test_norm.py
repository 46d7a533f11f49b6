"""Norms against fp64."""

import pytest
import torch
from torch import Tensor

from radixlm.kernels.cpu import norm


def data(tokens: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(tokens, dim, generator=generator) * 2 + 0.3
    return x, torch.randn(dim, generator=generator), torch.randn(dim, generator=generator)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def close(got: Tensor, want: Tensor) -> bool:
    return float((got.double() - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("dim", [1, 7, 16, 17, 64, 100, 1024])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_rms_norm(tokens: int, dim: int) -> None:
    x, weight, _ = data(tokens, dim)
    assert close(norm.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6))
    assert close(norm.rms_norm(x, weight, 1e-6, offset=1.0), rms(x, weight + 1, 1e-6))
    assert torch.equal(norm.rms_norm(x, weight, 1e-6)[-1:], norm.rms_norm(x[-1:], weight, 1e-6))
    residual = x.flip(0).clone()
    want = (x + residual).clone()
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual and torch.equal(total, want)
    assert close(normed, rms(want, weight, 1e-6))


@pytest.mark.parametrize("dim", [2, 16, 33, 768])
def test_layer_norm(dim: int) -> None:
    x, weight, bias = data(5, dim)
    want = torch.nn.functional.layer_norm(
        x.double(), (dim,), weight.double(), bias.double(), eps=1e-5
    )
    assert close(norm.layer_norm(x, weight, bias, 1e-5), want)
    residual = torch.zeros_like(x)
    assert close(norm.add_layer_norm(x, residual, weight, bias, 1e-5)[0], want)


def test_strided_rows_and_no_weight() -> None:
    wide, _, _ = data(4, 60)
    x = wide[:, 10:45]
    assert close(norm.rms_norm(x, None, 1e-6), rms(x, torch.ones(35), 1e-6))
    out = wide.clone()
    norm.rms_norm(out[:, 10:45], None, 1e-6, out=out[:, 10:45])
    assert torch.equal(out[:, 10:45], norm.rms_norm(x, None, 1e-6))
    assert torch.equal(out[:, :10], wide[:, :10]) and torch.equal(out[:, 45:], wide[:, 45:])


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
