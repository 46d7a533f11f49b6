"""The C++ backend against the definition of attention, on the cases of the reference backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.test_reference import VARIANTS, written_out
from tests.fakes.attention_case import Case, run_case

from radixlm.attention.cpu import CpuBackend, CpuPool
from radixlm.attention.select import default_backend, make_backend
from radixlm.base.errors import ConfigError
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.kv import DTYPES
from radixlm.pools.group import KvGroup
from radixlm.pools.memory import resident_bytes
from radixlm.pools.pool import PagedPool

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)
CPU = torch.device("cpu")
PLAIN = KvGroup(0, "full", (0, 2, 5), kv_heads=2, head_dim=6, v_dim=4)
LATENT = KvGroup(1, "full", (1, 3), kv_heads=1, head_dim=10, v_dim=8, latent=True)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=4),
    page_size=st.sampled_from([16, 48]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    name: str, shapes: list[tuple[int, int]], page_size: int, seed: int
) -> None:
    site = VARIANTS[name]
    case = Case.random(site, shapes, page_size, seed)
    for sequence, out in enumerate(run_case(case, site, "cpu")):
        torch.testing.assert_close(out, written_out(case, site, sequence), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window", "sinks", "latent"])
def test_pages_of_other_sequences_do_not_leak(name: str) -> None:
    site = VARIANTS[name]
    case = Case.random(site, [(2, 9), (1, 30), (1, 3)], 16, 1)
    clean, poisoned = (run_case(case, site, "cpu", poison=p) for p in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("name", ["plain", "window", "latent"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_caches_agree_with_the_reference_backend(name: str, dtype: torch.dtype) -> None:
    site = VARIANTS[name]
    case = Case.random(site, [(2, 60), (1, 90), (1, 3), (40, 33)], 16, 1, cache_dtype=dtype)
    ours, theirs = (run_case(case, site, backend) for backend in ("cpu", "torch_native"))
    # products of bfloat16 round queries and weights to it, like the values of these caches
    rtol, atol = (0.0, 1e-2) if cpu.isa in ("amx", "avx512bf16") else (1e-4, 1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_first_tokens_take_no_huge_pages() -> None:
    page_bytes = PLAIN.kv_heads * 16 * PLAIN.head_dim * 4
    pool = CpuPool(PLAIN, (32 << 20) // page_bytes, 16, torch.float32)
    for layer in range(len(PLAIN.layers)):
        rows = torch.ones(16, PLAIN.kv_heads, PLAIN.head_dim)
        pool.write(layer, [0], rows, rows[:, :, : PLAIN.v_dim])
    for tensor in pool.tensors:
        assert resident_bytes(tensor) < len(PLAIN.layers) * (1 << 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [PLAIN, LATENT], ids=["plain", "latent"])
def test_the_pool_reads_and_copies_like_the_reference_pool(
    group: KvGroup, dtype: torch.dtype
) -> None:
    ours, plain = CpuPool(group, 6, 16, dtype), PagedPool(group, 6, 16, dtype, CPU)
    for layer in range(len(group.layers)):
        k = torch.randn(6 * 16, group.kv_heads, group.head_dim)
        v = None if group.latent else torch.randn(6 * 16, group.kv_heads, group.v_dim)
        ours.write(layer, range(6), k, v)
        plain.write(layer, range(6), k, v)
    for pool in (ours, plain):
        pool.copy_pages([0, 1, 4], [1, 2, 5])
    for layer in range(len(group.layers)):
        (k, v), (other_k, other_v) = ours.read(layer, [5, 2, 1]), plain.read(layer, [5, 2, 1])
        assert torch.equal(k.float(), other_k.float())
        assert (v is None) == (other_v is None)
        assert v is None or other_v is None or torch.equal(v.float(), other_v.float())
        ours.write(layer, [0, 3, 4], k, v)  # values that were read are stored again unchanged
        again_k, again_v = ours.read(layer, [0, 3, 4])
        assert torch.equal(again_k.float(), k.float())
        assert v is None or again_v is None or torch.equal(again_v.float(), v.float())
    taken = ours.k.nbytes + ours.v.nbytes
    assert ours.nbytes_per_page * 6 == taken


def test_page_sizes_and_dtypes() -> None:
    backend = make_backend("cpu", (PLAIN,), bind("cpu"), CPU)
    assert isinstance(backend, CpuBackend)
    assert [n for n in range(1, 65) if backend.supports(n)] == [16, 32, 48, 64]
    assert backend.supports_dtype(torch.float8_e4m3fn)
    assert not backend.supports_dtype(torch.float64)


def test_default_depends_on_device() -> None:
    assert default_backend(CPU) == "cpu"


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-backend cpu: the model is on cuda"):
        make_backend("cpu", (PLAIN,), bind("cpu"), torch.device("cuda"))


def test_pages_outside_the_window_are_not_looked_up() -> None:
    site = VARIANTS["window"]
    case = Case.random(site, [(2, 60), (1, 90), (1, 3), (40, 33)], 16, 1)
    whole, forgotten = (run_case(case, site, "cpu", forget=f) for f in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(whole, forgotten, strict=True))
