"""Recurrences of the extension against those of torch, and against themselves in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixlm.kernels.cpu import scan
from radixlm.kernels.ops import state as ops

Case = tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Tensor, ...], tuple[int, ...]]


def selective(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    """The op, its arguments, and which of them have a token axis."""
    channels, a = h * p, -torch.rand(h * p, k, generator=g) * 4
    x, dt = (torch.randn(b, length, channels, generator=g) for _ in range(2))
    into, out = torch.randn(b, length, 2 * k, generator=g).chunk(2, -1)
    state = torch.randn(b, channels, k, generator=g)
    return scan.selective_scan, (x, dt.abs(), a, into, out, state), (0, 1, 3, 4)


def decayed(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    log = -torch.rand(b, length, h, generator=g) * 3
    shared = torch.randn(b, length, 1, k, generator=g).expand(b, length, h, k)  # a group of heads
    c, x = torch.randn(b, length, h, k, generator=g), torch.randn(b, length, h, p, generator=g)
    state = torch.randn(b, h, p, k, generator=g)
    return scan.decayed_attention, (x, log, shared, c, state), (0, 1, 2, 3)


def delta(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    q, key = torch.randn(b, length, h, 2 * k, generator=g).chunk(2, -1)
    key = key / key.norm(dim=-1, keepdim=True)
    v, beta = torch.randn(b, length, h, p, generator=g), torch.rand(b, length, h, generator=g)
    decays = 1 if k % 2 else k
    log = -torch.rand(b, length, h, decays, generator=g) * 2
    state = torch.randn(b, h, k, p, generator=g)
    return scan.delta_rule, (q, key, v, log, beta, state), (0, 1, 2, 3, 4)


def summed(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    log = -torch.rand(b, length, h * p, generator=g) * 3
    added, state = torch.randn(b, length, h * p, generator=g), torch.randn(b, h * p, generator=g)
    return scan.decayed_sum, (log, added, state), (0, 1)


def largest(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    log = -torch.rand(b, length, h * p, generator=g) * 3
    x, state = torch.randn(b, length, h * p, generator=g), torch.randn(b, h * p, generator=g)
    return scan.decayed_max, (log, x, state), (0, 1)


def mean(g: torch.Generator, b: int, length: int, h: int, k: int, p: int) -> Case:
    key, value = torch.randn(2, b, length, h * p, generator=g) * 4
    first, fade = torch.randn(h * p, generator=g), -torch.rand(h * p, generator=g) * 2
    state = torch.randn(b, 3, h * p, generator=g)
    state[:, 1] = state[:, 1].abs() + 0.1
    return scan.fading_mean, (key, value, first, fade, state), (0, 1)


KINDS = {
    "summed": summed, "selective": selective, "decayed": decayed, "delta": delta,
    "largest": largest, "mean": mean,
}  # fmt: skip
SIZES = {"b": 2, "length": 70, "h": 3, "k": 24, "p": 40}


def part(case: Case, piece: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """The op on some of the tokens, starting from a copy of a state."""
    run, given_, with_tokens = case
    cut = [x[:, piece] if i in with_tokens else x for i, x in enumerate(given_[:-1])]
    return run(*cut, state.clone())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20), b=st.integers(1, 3), length=st.integers(1, 75),
    h=st.integers(1, 3), k=st.integers(1, 70), p=st.integers(1, 70),
)  # fmt: skip
def test_equals_torch(kind: str, seed: int, **sizes: int) -> None:
    run, given_, _ = KINDS[kind](torch.Generator().manual_seed(seed), **sizes)
    reference = getattr(ops, run.__name__)
    wide = [x.double() for x in given_]
    for got, want in zip(run(*given_), reference(*wide), strict=True):
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert float((got - want).abs().max()) < 2e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_the_same_bits(kind: str) -> None:
    case = KINDS[kind](torch.Generator().manual_seed(1), **SIZES)
    run, given_, with_tokens = case
    whole, after = part(case, slice(None), given_[-1])
    for cut in (1, 33, 69):
        first, state = part(case, slice(cut), given_[-1])
        rest, state = part(case, slice(cut, None), state)
        assert torch.equal(torch.cat((first, rest), 1), whole) and torch.equal(state, after)
    has_batch = (*with_tokens, len(given_) - 1)
    alone = [x[1:] if i in has_batch else x for i, x in enumerate(given_)]
    assert torch.equal(run(*alone)[0], whole[1:])


def test_other_types_are_refused() -> None:
    run, given_, _ = delta(torch.Generator().manual_seed(1), **SIZES)
    with pytest.raises(TypeError, match=r"q: expected torch\.float32"):
        run(given_[0].double(), *given_[1:])
