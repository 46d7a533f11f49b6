"""Rotary embedding, q/k norm and the KV store against plain torch."""

import pytest
import torch
from torch import Tensor

from radixlm.kernels.cpu import cache as paged
from radixlm.kernels.cpu import rope
from radixlm.kernels.ops import kv
from radixlm.kernels.ops.rope import QkNorm, prepare_qk


def rotated(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    half = cos_sin.shape[1] // 2
    rows = cos_sin.double()[positions]
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    y = x.double().clone()
    parts = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if not interleaved:
        parts = (slice(0, half), slice(half, 2 * half))
    a, b = x.double()[..., parts[0]], x.double()[..., parts[1]]
    y[..., parts[0]], y[..., parts[1]] = a * cos - b * sin, b * cos + a * sin
    return y


def normed(x: Tensor, weight: Tensor, offset: float, dims: int) -> Tensor:
    flat = x.double().flatten(-dims)
    y = flat * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return (y * (weight.double() + offset)).view(x.shape)


def table(rotary: int) -> Tensor:
    inv_freq = 10000.0 ** -(torch.arange(rotary // 2) * 2 / rotary)
    angles = torch.arange(50, dtype=torch.float64)[:, None] * inv_freq.double()
    return torch.cat([angles.cos(), angles.sin()], 1).float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (64, 16), (80, 40), (24, 6)])
def test_apply_rotates_views_in_place(interleaved: bool, dim: int, rotary: int) -> None:
    qkv = torch.randn(7, 5 * dim, generator=torch.Generator().manual_seed(0))
    before = qkv.clone()
    q, k = qkv[:, : 3 * dim].view(7, 3, dim), qkv[:, 3 * dim : 4 * dim].view(7, 1, dim)
    positions = torch.tensor([0, 1, 49, 7, 7, 3, 20])
    want_q = rotated(q, table(rotary), positions, interleaved)
    want_k = rotated(k, table(rotary), positions, interleaved)
    rope.apply(q, k, table(rotary), positions, interleaved)
    assert (q - want_q).abs().max() < 2e-6 and (k - want_k).abs().max() < 2e-6
    assert torch.equal(qkv[:, 4 * dim :], before[:, 4 * dim :])


@pytest.mark.parametrize("kind", ["", "head", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [16, 48])
def test_norm_rope_store(kind: str, dtype: torch.dtype, page_size: int) -> None:
    heads, kv_heads, dim, v_dim = 4, 2, 40, 24
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, heads, dim, generator=generator)
    k = torch.randn(6, kv_heads, dim, generator=generator)
    v = torch.randn(6, kv_heads, v_dim, generator=generator)
    width = {"": 0, "head": 1, "row": None}[kind]
    q_weight = torch.randn(dim * (width or heads), generator=generator)
    k_weight = torch.randn(dim * (width or kv_heads), generator=generator)
    norm = QkNorm(kind, False, 1e-6, q_weight + 1, k_weight + 1) if kind else None
    shape = paged.CacheShape(kv_heads, dim, v_dim, page_size, dtype)
    caches = shape.allocate(3)
    for tensor in caches:
        tensor.zero_()
    slots = torch.tensor([0, 2 * page_size + 15, -1, 17, page_size - 1, 3], dtype=torch.int32)
    positions = torch.arange(6)
    want_q, want_k = q, k
    if kind:
        dims = 1 if kind == "head" else 2
        want_q, want_k = normed(q, q_weight, 1.0, dims), normed(k, k_weight, 1.0, dims)
    want_q = rotated(want_q, table(32), positions, False)
    want_k = rotated(want_k, table(32), positions, False)
    rope.qk_norm_rope_store(
        q, k, v, caches, slots, norm=norm, cos_sin=table(32), positions_T=positions
    )
    assert (q - want_q).abs().max() < 1e-5 and (k - want_k).abs().max() < 1e-5
    stored_k, stored_v = paged.tokens_of_k(caches[0]), paged.tokens_of_v(caches[1])
    kept = slots >= 0
    assert torch.equal(stored_k[slots[kept].long()], k[kept].to(dtype))
    assert torch.equal(stored_v[slots[kept].long()], v[kept].to(dtype))
    assert int(stored_k.abs().sum((1, 2)).count_nonzero()) == 5
    assert torch.equal(paged.pages_from_k(stored_k, page_size), caches[0])
    assert torch.equal(paged.pages_from_v(stored_v, page_size), caches[1])


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
@pytest.mark.parametrize("is_latent", [False, True])
def test_stored_rows_are_those_of_the_reference(dtype: torch.dtype, is_latent: bool) -> None:
    """Rows of every size, with values that the dtype cannot represent; bytes are compared."""
    generator = torch.Generator().manual_seed(4)
    k, v = torch.randn(32, 2, 40, generator=generator), torch.randn(32, 2, 24, generator=generator)
    size = torch.logspace(-12, 6, 32)[:, None, None]
    k, v = k * size, v * size
    k[3], k[4, 1, 7], v[5, 0, 2], v[6] = 0.0, torch.inf, torch.nan, 1e-35
    k[7, 0, :5] = torch.tensor([448.0, 463.9, 464.1, -57344.0, 2.0**-16])
    shape = paged.CacheShape(2, 40, 24, 32, dtype, is_latent)
    caches, slots = shape.allocate(1), torch.arange(32)
    if is_latent:
        rope.latent_store(k, shape, caches, slots)
    else:
        rope.kv_store(k, v, caches, slots)
    for got, want in zip(shape.tokens(*caches), shape.tokens(*shape.pages(k, v)), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def runs_of_slots(num_tokens: int, num_pages: int) -> Tensor:
    """Whole tiles, parts of tiles, single slots and tokens without a slot, as in batches."""
    draw = torch.Generator().manual_seed(7)
    free = (torch.randperm(num_pages, generator=draw) * 16).tolist()
    slots: list[int] = []
    while len(slots) < num_tokens:
        length = int(torch.randint(1, 17, (1,), generator=draw)) if len(slots) % 3 else 16
        first = int(torch.randint(0, 17 - length, (1,), generator=draw))
        page = free.pop()
        slots += [-1] if length == 3 else range(page + first, page + first + length)
    return torch.tensor(slots[:num_tokens], dtype=torch.int32)


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (64, 64), (40, 16)])
def test_tokens_are_stored_the_same_in_any_order(dtype: torch.dtype, dim: int, rotary: int) -> None:
    num_tokens, heads, kv_heads = 650, 3, 2
    draw = torch.Generator().manual_seed(8)
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim, generator=draw)
    weight = torch.rand(dim, generator=draw) + 0.5
    norm = QkNorm("head", False, 1e-6, weight, weight)
    shape = paged.CacheShape(kv_heads, dim, dim, 16, dtype)
    slots, positions = runs_of_slots(num_tokens, 400), torch.arange(num_tokens) % 50

    def stored(order: Tensor) -> tuple[Tensor, ...]:
        rows, caches = qkv[order], shape.allocate(400)
        for tensor in caches:
            tensor.view(torch.uint8).zero_()
        q, k, v = rows.view(num_tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
        rope.qk_norm_rope_store(
            q, k, v, caches, slots[order], norm=norm,
            cos_sin=table(rotary), positions_T=positions[order],
        )  # fmt: skip
        return rows[order.argsort()], *(tensor.view(torch.uint8) for tensor in caches)

    together = stored(torch.arange(num_tokens))
    apart = stored(torch.randperm(num_tokens, generator=draw))  # few whole tiles
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    q = qkv[:, : heads * dim].view(num_tokens, heads, dim)
    want = rotated(normed(q, weight, 0.0, 1), table(rotary), positions, False)
    assert (together[0][:, : heads * dim].view_as(q) - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [*kv.SCALED, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_row_that_was_read_is_stored_as_it_was(dtype: torch.dtype) -> None:
    shape = paged.CacheShape(1, 64, 64, 16, dtype)
    for seed in range(20):
        torch.manual_seed(seed)
        k, v = (
            torch.randn(64, 1, 64) * 10.0 ** torch.randint(-8, 3, (64, 1, 1)),
            torch.rand(64, 1, 64),
        )
        first = shape.pages(k, v)
        second = shape.pages(*shape.tokens(*first))
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(first, second, strict=True)
        )


def test_cache_geometry_is_checked() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        paged.CacheShape(1, 8, 8, 24, torch.float32)
    shape = paged.CacheShape(1, 8, 8, 16, torch.float32)
    k, v = shape.allocate(2)
    with pytest.raises(ValueError, match="v_cache"):
        shape.fields(k, v.transpose(2, 3))


@pytest.mark.parametrize("kind", ["head", "row", "each"])
@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prepare_matches_the_reference(kind: str, is_layer_norm: bool, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, kv_heads, dim = 3, 2, 24
    sizes = {"head": ((dim,),) * 2, "row": ((heads * dim,), (kv_heads * dim,))}
    sizes["each"] = ((heads, dim), (kv_heads, dim))
    weights = [make(*size) for size in sizes[kind]]
    biases = [make(*size) if has_bias and is_layer_norm else None for size in sizes[kind]]
    norm = QkNorm(kind, is_layer_norm, 1e-5, *weights, *biases)
    q, k, angles = make(5, heads, dim), make(5, kv_heads, dim), make(5, 12)
    want_q, want_k = q.clone(), k.clone()
    prepare_qk(want_q, want_k, norm, angles, True)
    rope.prepare(q, k, norm, angles, interleaved=True)
    assert (q - want_q).abs().max() < 1e-5 and (k - want_k).abs().max() < 1e-5


def test_query_heads_may_have_gates_between_them() -> None:
    both = torch.randn(4, 3, 2, 16, generator=torch.Generator().manual_seed(3))
    q, before = both[:, :, 0], both.clone()
    want = before[:, :, 0].clone()
    rope.apply(want, None, table(16), torch.arange(4))
    rope.apply(q, None, table(16), torch.arange(4))
    assert torch.equal(q, want) and torch.equal(both[:, :, 1], before[:, :, 1])
