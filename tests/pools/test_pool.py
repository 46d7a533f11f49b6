"""KV pools: pages move over all layers, and read back as written."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops.kv import DTYPES
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool

PLAIN = KvGroup(0, "full", (0, 2, 5), kv_heads=2, head_dim=6, v_dim=4)
LATENT = KvGroup(1, "full", (1, 3), kv_heads=1, head_dim=10, v_dim=8, latent=True)


def filled(group: KvGroup, dtype: torch.dtype = torch.float32) -> PagedPool:
    pool = PagedPool(group, 7, 3, dtype, torch.device("cpu"))
    for layer in range(len(group.layers)):
        k, v = pool.read(layer, range(7))
        k = torch.randn(k.shape)
        pool.write(layer, range(7), k, None if v is None else torch.randn(v.shape))
    return pool


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [PLAIN, LATENT], ids=["plain", "latent"])
def test_page_bytes_equal_those_of_the_tensors(group: KvGroup, dtype: torch.dtype) -> None:
    pool = filled(group, dtype)
    taken = pool.k_LPBKC.nbytes + (0 if pool.v_LPBKV is None else pool.v_LPBKV.nbytes)
    taken += sum(scale.nbytes for scale in pool.scales)
    assert pool.nbytes_per_page * pool.num_pages == taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group", [PLAIN, LATENT], ids=["plain", "latent"])
def test_copied_pages_hold_the_old_content_even_when_chains_overlap(
    group: KvGroup, dtype: torch.dtype
) -> None:
    pool = filled(group, dtype)
    before = [pool.read(layer, range(7)) for layer in range(len(group.layers))]
    pool.copy_pages([0, 1, 4], [1, 2, 6])
    for layer, (k, v) in enumerate(before):
        order = [0, 0, 1, 3, 4, 5, 4]  # page 1 got 0, page 2 got the old 1, page 6 got 4
        rows = (torch.tensor(order)[:, None] * 3 + torch.arange(3)).flatten()
        got_k, got_v = pool.read(layer, range(7))
        assert torch.equal(got_k.float(), k[rows].float())
        assert (v is None) == (got_v is None)
        assert v is None or got_v is None or torch.equal(got_v.float(), v[rows].float())


def test_read_after_write_in_any_order() -> None:
    pool = filled(PLAIN)
    k, v = torch.randn(6, 2, 6), torch.randn(6, 2, 4)
    pool.write(1, [5, 2], k, v)
    got_k, got_v = pool.read(1, [2, 5])
    assert got_v is not None
    assert torch.equal(got_k, torch.cat((k[3:], k[:3])))
    assert torch.equal(got_v, torch.cat((v[3:], v[:3])))


def test_values_of_a_latent_pool_are_its_first_key_channels() -> None:
    pool = filled(LATENT)
    k, v = pool.load(1, torch.tensor([[3, 20], [0, 3]]), torch.float64)
    assert k.shape == (2, 2, 1, 10) and k.dtype == torch.float64
    assert torch.equal(v, k[..., :8])


def test_a_new_pool_is_finite() -> None:
    pool = PagedPool(PLAIN, 7, 3, torch.float32, torch.device("cpu"))
    assert not pool.k_LPBKC.any()
