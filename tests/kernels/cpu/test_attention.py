"""Paged attention against fp64, and a token's result against the same token computed in other
batches and chunks."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from radixlm.kernels.cpu import cache as paged
from radixlm.kernels.cpu.attention import PagedAttention
from radixlm.kernels.ops import kv


@dataclass(frozen=True)
class Case:
    """Sequences (new tokens, all tokens) over one kind of layer."""

    lens: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    v_dim: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    chunk: int = 0
    has_slopes: bool = False
    scale: float = 0.2
    is_latent: bool = False  # values are the first channels of the keys


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as the cache stores them."""
    if dtype in kv.SCALED:
        return kv.dequantize(*kv.quantize(x, dtype), x.shape[-1])
    return kv.to_kv(x, dtype).float()


def rounded_key(x: Tensor, dtype: torch.dtype) -> Tensor:
    """K as a cache that is not latent stores it."""
    if dtype != kv.INT4:
        return rounded(x, dtype)
    return kv.rotate_back(rounded(kv.rotate(x), dtype))


def rounded_query(q: Tensor) -> Tensor:
    """What meets keys of int4: 8 bits for each 32 rotated channels."""
    channels = q.shape[-1]
    groups = kv.split(F.pad(kv.rotate(q), (0, -channels % kv.GROUP_4)), -1, (-1, kv.GROUP_4))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return kv.rotate_back(((groups / step).round() * step).flatten(-2)[..., :channels])


def limit(layer: PagedAttention) -> float:
    """Error limit relative to the largest value. Products of bfloat16 round weights to it; with
    int4 a number of a query may be rounded the other way."""
    return 5e-3 if layer.rounds_inputs or layer.cache.dtype == kv.INT4 else 1e-5


class World:
    """Random sequences in a paged cache with pages in random order. Unowned memory is NaN, so a
    stray read shows."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        g = torch.Generator().manual_seed(seed)
        self.total = [total for _, total in case.lens]
        per_seq = [-(-t // case.page_size) for t in self.total]
        num_pages = sum(per_seq) + 2
        self.shape = paged.CacheShape(
            case.kv_heads, case.dim, case.v_dim, case.page_size, case.dtype, case.is_latent
        )
        order = torch.randperm(num_pages, generator=g).tolist()
        self.pages = torch.full((len(case.lens), max(per_seq) + 1), -7, dtype=torch.int32)
        k_tokens = torch.full((num_pages * case.page_size, case.kv_heads, case.dim), torch.nan)
        v_tokens = torch.full((num_pages * case.page_size, case.kv_heads, case.v_dim), torch.nan)
        self.k, self.v, self.q = [], [], []
        for s, total in enumerate(self.total):
            mine = [order.pop() for _ in range(per_seq[s])]
            self.pages[s, : len(mine)] = torch.tensor(mine)
            as_key = rounded if case.is_latent else rounded_key
            k = as_key(torch.randn(total, case.kv_heads, case.dim, generator=g), case.dtype)
            v = k[..., : case.v_dim]
            if not case.is_latent:
                v = rounded(torch.randn(total, case.kv_heads, case.v_dim, generator=g), case.dtype)
            slots = self.pages[s].long().repeat_interleave(case.page_size) * case.page_size
            slots = (slots + torch.arange(case.page_size).repeat(len(self.pages[s])))[:total]
            k_tokens[slots], v_tokens[slots] = k, v
            self.k.append(k)
            self.v.append(v)
            self.q.append(torch.randn(total, case.heads, case.dim, generator=g))
        self.caches = self.shape.pages(k_tokens, None if case.is_latent else v_tokens)
        self.sinks = torch.randn(case.heads, generator=g) if case.has_sinks else None
        self.slopes = torch.rand(case.heads, generator=g) if case.has_slopes else None
        self.layer = PagedAttention(
            case.heads, self.shape, case.scale, window=case.window, softcap=case.softcap,
            sinks_H=self.sinks, chunk=case.chunk, slopes_H=self.slopes,
        )  # fmt: skip

    def run(self, lens: list[tuple[int, int]], threads: int = 1) -> list[Tensor]:
        """Outputs of the last `new` of the first `total` tokens of each sequence."""
        q = [self.q[s][total - new : total] for s, (new, total) in enumerate(lens)]
        starts = torch.tensor([0, *[new for new, _ in lens]], dtype=torch.int32).cumsum(0)
        out = self.layer.run(
            torch.cat(q), *self.caches, self.pages, starts.int(),
            torch.tensor([total for _, total in lens], dtype=torch.int32), num_threads=threads,
        )  # fmt: skip
        return list(out.split([new for new, _ in lens]))

    def reference(self, s: int, new: int, total: int) -> Tensor:
        case = self.case
        group = case.heads // case.kv_heads
        k = self.k[s][:total].double().repeat_interleave(group, 1)
        v = self.v[s][:total].double().repeat_interleave(group, 1)
        q = self.q[s][total - new : total] * case.scale
        if case.dtype == kv.INT4 and not case.is_latent:
            q = rounded_query(q)
        q = (q.bfloat16() if self.layer.rounds_inputs else q).double()
        scores = torch.einsum("qhd,khd->hqk", q, k)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        at, key = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        if self.slopes is not None:
            scores += self.slopes.double()[:, None, None] * (key - at)
        hidden = key > at
        if case.window:
            hidden |= key <= at - case.window
        if case.chunk:
            hidden |= key // case.chunk != at // case.chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, new, 1)
            scores = torch.cat([scores, sink], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], v)


BASE = Case(((1, 1), (1, 70), (5, 5), (3, 130), (40, 100), (1, 600)))
CASES = [
    BASE,
    replace(BASE, heads=6, kv_heads=1, dim=128, v_dim=128, page_size=32),
    replace(BASE, dtype=torch.bfloat16, dim=64, v_dim=64),
    replace(BASE, dtype=torch.float16, heads=2, page_size=64),
    replace(BASE, dtype=torch.int8, dim=64, v_dim=48),
    replace(BASE, dtype=kv.INT4, dim=64, v_dim=48),
    replace(BASE, dtype=kv.INT4, dim=96, v_dim=48),
    replace(BASE, dtype=kv.INT4, heads=14, page_size=32, softcap=3.0, dim=24, v_dim=20),
    replace(BASE, dtype=torch.int8, heads=14, page_size=32, softcap=3.0, dim=24, v_dim=20),
    replace(BASE, dtype=torch.float8_e4m3fn, window=70),
    replace(BASE, dtype=torch.float8_e5m2, dim=72, v_dim=40),
    replace(BASE, window=33),
    replace(BASE, chunk=50, has_slopes=True),
    replace(BASE, chunk=100, dtype=torch.bfloat16, has_slopes=True, softcap=5.0),
    replace(BASE, window=1, has_sinks=True),
    replace(BASE, softcap=3.0, scale=1.0),
    replace(BASE, has_sinks=True, dim=40, v_dim=24),
    replace(BASE, dim=96, v_dim=20, dtype=torch.bfloat16),
    Case(((1, 1300), (20, 1100)), heads=8, kv_heads=2, window=700, page_size=128),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_mixed_rows_match_fp64(case: Case, threads: int) -> None:
    world = World(case)
    for s, got in enumerate(world.run(list(case.lens), threads)):
        want = world.reference(s, *case.lens[s])
        assert float((got - want).abs().max() / want.abs().max()) < limit(world.layer), s


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, window=50, dtype=torch.bfloat16),
        replace(BASE, dtype=torch.int8, chunk=40, has_slopes=True),
        replace(BASE, dtype=torch.float8_e5m2),
        replace(BASE, dtype=kv.INT4, heads=6, dim=40),
        replace(BASE, dtype=torch.bfloat16, heads=2, dim=40, v_dim=48),
        replace(BASE, dtype=torch.bfloat16, heads=3, kv_heads=1),
        replace(BASE, dtype=torch.int8, heads=7, kv_heads=1),
        replace(BASE, dtype=torch.bfloat16, heads=8, kv_heads=1, softcap=3.0, has_sinks=True),
    ],
)
def test_decode_equals_prefill_bit_for_bit(case: Case) -> None:
    world = World(replace(case, lens=((150, 150), (90, 90))))
    whole = world.run([(150, 150), (90, 90)], threads=2)
    for cut in (1, 16, 63, 89):
        first = world.run([(cut, cut), (cut, cut)])
        rest = world.run([(150 - cut, 150), (90 - cut, 90)], threads=2)
        for s in range(2):
            assert torch.equal(torch.cat([first[s], rest[s]]), whole[s]), cut
    for total in (1, 64, 65, 90):
        decoded = world.run([(1, total), (1, total)])
        for s in range(2):
            assert torch.equal(decoded[s][0], whole[s][total - 1]), total


def test_splits_merge_the_same_in_decode_and_prefill() -> None:
    world = World(Case(((1200, 1200),), heads=2, kv_heads=1))
    whole = world.run([(1200, 1200)], threads=2)[0]
    for total in (512, 513, 1024, 1025, 1200):
        for threads in (1, 2, 3):
            assert torch.equal(world.run([(1, total)], threads)[0][0], whole[total - 1]), total


JOINED = Case(((1, 2900), (2, 2600), (1, 70)), heads=6, kv_heads=3)


@pytest.mark.parametrize(
    "case",
    [
        JOINED,
        replace(JOINED, dtype=torch.bfloat16, window=1000),
        replace(JOINED, dtype=torch.bfloat16, v_dim=40),
        replace(JOINED, dtype=torch.int8, has_sinks=True),
        replace(JOINED, dtype=kv.INT4),
    ],
)
def test_joined_heads_have_the_bits_of_single_ones(case: Case) -> None:
    """One thread takes the heads of a page together, three each one alone."""
    world, lens = World(case), list(case.lens)
    joined, single = (world.run(lens, threads) for threads in (1, 3))
    assert all(torch.equal(x, y) for x, y in zip(joined, single, strict=True))
    want = world.reference(0, *lens[0])
    assert float((joined[0] - want).abs().max() / want.abs().max()) < limit(world.layer)


def test_tree_mask_shows_only_ancestors() -> None:
    world = World(Case(((4, 100),)))
    parents = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])
    q = world.q[0][96:]
    out = world.layer.run(
        q, *world.caches, world.pages, torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([100], dtype=torch.int32), tree_mask_TN=parents.to(torch.uint8),
    )  # fmt: skip
    k, v = world.k[0].double(), world.v[0].double()
    visible = torch.cat([torch.ones(4, 96), parents], 1).bool()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.repeat_interleave(2, 1)) * 0.2
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    assert float((out - want).abs().max()) < 1e-5
