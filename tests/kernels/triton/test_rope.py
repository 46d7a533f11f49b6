"""q/k norms, rotation and the store of K and V against the separate reference steps."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops import rope as reference
from radixlm.kernels.ops.kv import to_kv
from radixlm.kernels.ops.rope import QkNorm
from radixlm.kernels.triton import rope

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one row, as the projection returns them."""
    qkv = random((tokens, (heads + 2 * kv_heads) * dim), dtype, 1)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)


def norm_of(kind: str, heads: int, kv_heads: int, dim: int, is_layer: bool) -> QkNorm | None:
    if not kind:
        return None
    shapes = {
        "head": ((dim,), (dim,)),
        "each": ((heads, dim), (kv_heads, dim)),
        "row": ((heads * dim,), (kv_heads * dim,)),
    }[kind]
    weights = [random(s, torch.float32, 5 + i) for i, s in enumerate((*shapes, *shapes))]
    return QkNorm(kind, is_layer, 1e-5, *weights[: 4 if is_layer else 2])  # type: ignore[arg-type]


NORMS = [("", False), ("head", False), ("each", False), ("row", False), ("head", True)]


@pytest.mark.parametrize(
    ("dtype", "kind", "is_layer", "half"),
    [
        *((torch.float32, *norm, half) for norm in NORMS for half in (0, 8, 24)),
        (torch.float16, "head", False, 24),
        (torch.bfloat16, "head", False, 24),
        (torch.bfloat16, "", False, 8),
    ],
)
def test_prepare_matches_the_reference(
    dtype: torch.dtype, kind: str, is_layer: bool, half: int
) -> None:
    for interleaved, (heads, kv_heads) in ((False, (4, 2)), (True, (7, 1))):
        q, k, v = case(2, heads, kv_heads, 48, dtype)
        cos_sin = random((2, 2 * half), torch.float32, 3) if half else None
        norm = norm_of(kind, heads, kv_heads, 48, is_layer)
        wanted_q, wanted_k, same_v = q.clone(), k.clone(), v.clone()
        reference.prepare_qk(wanted_q, wanted_k, norm, cos_sin, interleaved)
        rope.prepare_qk(q, k, norm, cos_sin, interleaved)
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(q, wanted_q, rtol=limit, atol=limit)
        torch.testing.assert_close(k, wanted_k, rtol=limit, atol=limit)
        assert torch.equal(v, same_v)


@pytest.mark.parametrize(
    "cache", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("kind", ["", "head", "row"])
def test_stored_rows_equal_the_returned_rows(cache: torch.dtype, kind: str) -> None:
    q, k, v = case(5, 6, 3, 40, torch.float16)
    v[0, 0, 0] = 60000.0  # beyond the range of an 8-bit float
    twins = [x.clone() for x in (q, k)]
    cos_sin = random((5, 40), torch.float32, 3)
    norm = norm_of(kind, 6, 3, 40, False)
    pools = [torch.zeros(2, 12, 3, 40, dtype=cache) for _ in "kv"]  # two layers
    slots = torch.tensor([7, 0, -1, 11, 3])
    rope.prepare(q, k, norm, cos_sin, False, rope.Store(v, pools[0][1], pools[1][1], slots))
    rope.prepare(*twins, norm, cos_sin, False)
    assert torch.equal(q, twins[0]) and torch.equal(k, twins[1])
    for pool, rows in zip(pools, (k, v), strict=True):
        wanted = torch.zeros(12, 3, 40)
        kept = slots >= 0
        wanted[slots[kept]] = to_kv(rows[kept], cache).float()
        assert torch.equal(pool[1].float(), wanted)
        assert not pool[0].float().any()


def test_some_channels_rotate_in_place() -> None:
    whole = random((4, 3, 56), torch.float32, 1)
    twin = whole.clone()
    cos_sin = random((4, 16), torch.float32, 2)
    for interleaved in (False, True):
        rope.rope(whole[..., 40:], cos_sin, interleaved)
        reference.rope(twin[..., 40:], cos_sin, interleaved)
    torch.testing.assert_close(whole, twin, rtol=3e-6, atol=3e-6)


def test_other_dtypes_use_the_reference() -> None:
    x = random((4, 3, 16), torch.float64, 1)
    twin, cos_sin = x.clone(), random((4, 16), torch.float32, 2)
    rope.rope(x, cos_sin, False)
    reference.rope(twin, cos_sin, False)
    assert torch.equal(x, twin)
