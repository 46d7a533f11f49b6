"""Random shapes against fp64 and against the same row computed alone; 2,000 of each in the slow
form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu.test_attention import Case, World, limit

from radixlm.kernels.cpu import cache as paged
from radixlm.kernels.cpu import norm, rope
from radixlm.kernels.ops import kv

QUICK, MANY = 60, 2000
Check = Callable[..., None]


def worlds(**fixed: Any) -> dict[str, Any]:
    """Ragged sequences over one kind of layer."""
    new_and_all = st.tuples(st.integers(1, 60), st.integers(0, 300))
    kinds: dict[str, Any] = {
        "lens": st.lists(new_and_all.map(lambda t: (t[0], sum(t))), min_size=1, max_size=4),
        "group": st.integers(1, 20),
        "kv_heads": st.integers(1, 3),
        "dim": st.integers(1, 34).map(lambda n: n * 4),
        "v_dim": st.integers(1, 34).map(lambda n: n * 4),
        "page_size": st.sampled_from([16, 32, 48, 128]),
        "dtype": st.sampled_from(kv.DTYPES),
        "window": st.sampled_from([0, 0, 1, 17, 100]),
        "softcap": st.sampled_from([0.0, 5.0]),
        "has_sinks": st.booleans(),
        "chunk": st.sampled_from([0, 0, 40]),
        "has_slopes": st.booleans(),
        "threads": st.integers(1, 3),
    }
    return {**kinds, **fixed}


def check_world(lens: Any, group: int, kv_heads: int, threads: int, **kind: Any) -> None:
    world = World(Case(tuple(lens), group * kv_heads, kv_heads, **kind))
    together = world.run(lens, threads)
    for s, (new, total) in enumerate(lens):
        want = world.reference(s, new, total)
        assert float((together[s] - want).abs().max() / want.abs().max()) < limit(world.layer)
        alone = world.run([(1, total) if i == s else (0, 0) for i in range(len(lens))])
        assert torch.equal(alone[s][0], together[s][-1])


STORES: dict[str, Any] = {
    "tokens": st.integers(1, 40),
    "kv_heads": st.integers(1, 4),
    "dim": st.integers(1, 140),
    "v_dim": st.integers(1, 140),
    "page_size": st.sampled_from([16, 48]),
    "dtype": st.sampled_from(kv.DTYPES),
    "size": st.sampled_from([1e-20, 1.0, 300.0]),
    "seed": st.integers(0, 9999),
}


def check_store(
    tokens: int, kv_heads: int, dim: int, v_dim: int, page_size: int, dtype: torch.dtype,
    size: float, seed: int,
) -> None:  # fmt: skip
    """Rows at random slots read back as the reference rounds them; other slots do not change."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, kv_heads, dim, generator=g) * size
    v = torch.randn(tokens, kv_heads, v_dim, generator=g) * size
    shape = paged.CacheShape(kv_heads, dim, v_dim, page_size, dtype)
    room = -(-tokens // page_size) * page_size + page_size
    slots = torch.randperm(room, generator=g)[:tokens]
    whole_k, whole_v = torch.zeros(room, kv_heads, dim), torch.zeros(room, kv_heads, v_dim)
    caches = shape.pages(whole_k, whole_v)
    rope.kv_store(k, v, caches, torch.where(slots == slots[0], -1, slots))
    whole_k[slots[1:]], whole_v[slots[1:]] = k[1:], v[1:]
    expected = shape.tokens(*shape.pages(whole_k, whole_v))
    for got, want in zip(shape.tokens(*caches), expected, strict=True):
        assert torch.equal(got.float(), want.float())


NORMS: dict[str, Any] = {
    "rows": st.integers(1, 40),
    "dim": st.integers(1, 700),
    "is_layer_norm": st.booleans(),
    "adds": st.booleans(),
    "seed": st.integers(0, 9999),
}


def check_norm(rows: int, dim: int, is_layer_norm: bool, adds: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, dim, generator=g) for _ in range(2))
    weight, bias = (torch.randn(dim, generator=g) for _ in range(2))
    total = (x + residual if adds else x).double()
    if is_layer_norm:
        want = torch.layer_norm(total, (dim,), weight.double(), bias.double(), 1e-3)
        alone = norm.layer_norm(total[-1:].float(), weight, bias, 1e-3)
        got = (
            norm.add_layer_norm(x, residual, weight, bias, 1e-3)[0]
            if adds
            else norm.layer_norm(x, weight, bias, 1e-3)
        )
    else:
        want = total * (total.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
        alone = norm.rms_norm(total[-1:].float(), weight, 1e-3)
        got = (
            norm.add_rms_norm(x, residual, weight, 1e-3)[0]
            if adds
            else norm.rms_norm(x, weight, 1e-3)
        )
    assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max()) + 1e-5
    assert torch.equal(got[-1:], alone)


CHECKS: dict[str, tuple[dict[str, Any], Check]] = {
    "attention": (worlds(), check_world),
    "store": (STORES, check_store),
    "norm": (NORMS, check_norm),
}


def run_check(name: str, examples: int) -> None:
    kinds, check = CHECKS[name]
    profile = settings(max_examples=examples, deadline=None, derandomize=True)
    profile(given(**kinds)(check))()


@pytest.mark.parametrize("name", list(CHECKS))
def test_some_shapes(name: str) -> None:
    run_check(name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
def test_many_shapes(name: str) -> None:
    run_check(name, MANY)
