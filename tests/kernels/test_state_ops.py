"""Recurrences in chunks equal the same recurrences token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.kernels.ops import state as ops


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _scan(g: torch.Generator, batch: int, length: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    a = torch.rand(batch, length, 3, generator=g)
    return ops.linear_scan, (a, _random(g, batch, length, 3), _random(g, batch, 3))


def _mamba(g: torch.Generator, batch: int, length: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    a = -torch.rand(5, 4, generator=g) * 8
    dt = torch.rand(batch, length, 5, generator=g) * 3

    def run(x: Any, dt: Any, b: Any, c: Any, state: Any) -> Any:
        return ops.selective_scan(x, dt, a, b, c, state)

    b, c = (_random(g, batch, length, 4) for _ in range(2))
    return run, (_random(g, batch, length, 5), dt, b, c, _random(g, batch, 5, 4))


def _decayed(g: torch.Generator, batch: int, length: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    log = -torch.rand(batch, length, 2, generator=g) * 20
    b, c = (_random(g, batch, length, 2, 4) for _ in range(2))
    x, state = _random(g, batch, length, 2, 3), _random(g, batch, 2, 3, 4)
    return ops.decayed_attention, (x, log, b, c, state)


def _delta(channels: int) -> Any:
    def make(g: torch.Generator, batch: int, length: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        q, k = (_random(g, batch, length, 2, 4) for _ in range(2))
        k = k / k.norm(dim=-1, keepdim=True)
        log = -torch.rand(batch, length, 2, channels, generator=g) * 6
        beta = torch.rand(batch, length, 2, generator=g)
        v, state = _random(g, batch, length, 2, 3), _random(g, batch, 2, 4, 3)
        return ops.delta_rule, (q, k, v, log, beta, state)

    return make


KINDS = {
    "scan": _scan,
    "mamba": _mamba,
    "decayed": _decayed,
    "delta": _delta(1),
    "channel delta": _delta(4),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(length=st.integers(1, 150), cut=st.integers(0, 150), batch=st.integers(1, 3))
def test_chunks_equal_single_steps(kind: str, length: int, cut: int, batch: int) -> None:
    """At once, in two chunks, and token by token; the last state too."""
    generator = torch.Generator().manual_seed(length)
    run, (*inputs, state) = KINDS[kind](generator, batch, length)
    whole, last = run(*inputs, state)
    outputs, after = [], state
    for t in range(length):
        one, after = run(*(x[:, t : t + 1] for x in inputs), after)
        outputs.append(one)
    torch.testing.assert_close(whole, torch.cat(outputs, 1), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(last, after, rtol=2e-4, atol=2e-4)
    if 0 < cut < length:
        _, middle = run(*(x[:, :cut] for x in inputs), state)
        second, end = run(*(x[:, cut:] for x in inputs), middle)
        torch.testing.assert_close(whole[:, cut:], second, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(last, end, rtol=2e-4, atol=2e-4)


def test_a_delta_step_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    _, (q, k, v, log, beta, state) = _delta(1)(generator, 1, 1)
    out, after = ops.delta_rule(q, k, v, log, beta, state)
    kept = state[0, 0] * log[0, 0, 0].exp()
    wrong = v[0, 0, 0] - k[0, 0, 0] @ kept
    expected = kept + torch.outer(k[0, 0, 0], wrong) * beta[0, 0, 0]
    torch.testing.assert_close(after[0, 0], expected)
    torch.testing.assert_close(out[0, 0, 0], q[0, 0, 0] @ expected)


def test_a_convolution_reads_the_tokens_before() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = _random(generator, 2, 9, 3), _random(generator, 3, 4)
    start = torch.zeros(2, 3, 3)
    whole, _ = ops.causal_conv(x, start, weight, None)
    first, state = ops.causal_conv(x[:, :2], start, weight, None)
    second, _ = ops.causal_conv(x[:, 2:], state, weight, None)
    torch.testing.assert_close(whole, torch.cat((first, second), 1))
    torch.testing.assert_close(whole[0, 3], (x[0, :4].T * weight).sum(-1))
