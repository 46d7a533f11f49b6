"""The attention kernels alone: stored values, the plan of splits, and that the most used tiles
compile without spills. Their results: tests/attention/test_triton.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.triton.gate import read_record
from tests.kernels.triton.test_compile import compile_in_process, is_good

from radixlm.kernels.ops import kv
from radixlm.kernels.triton.attention_plan import UNBOUNDED, Cut, Work, make_plan
from radixlm.kernels.triton.attention_run import Shape, channel_blocks, tiles_of
from radixlm.kernels.triton.attention_store import store
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool
from radixlm.step.batch import AttentionSite

CPU = torch.device("cpu")


def representable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as the cache stores it; the interpreter does not round to 16 and 8 bits as a GPU does."""
    return x if dtype in kv.SCALED else x.to(dtype).float()


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
def test_stores_what_the_pool_would_store(dtype: torch.dtype, latent: bool) -> None:
    group = KvGroup(0, "full", (0, 1), 1 if latent else 2, 24, 20, latent)
    ours, theirs = (PagedPool(group, 3, 16, dtype, CPU) for _ in range(2))
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(37, group.kv_heads, 30, generator=g)[..., :24]  # channels of a wider row
    k = representable(rows, dtype)
    v = representable(torch.randn(37, group.kv_heads, 20, generator=g) * 50, dtype)
    k[3], k[4, 0, 0] = 0, 384.0
    slots = torch.randperm(48, generator=g)[:37]
    slots[7] = -1
    keep = slots >= 0
    theirs.store(1, slots[keep], k[keep], None if latent else v[keep])
    v_cache = None if ours.v_LPBKV is None else ours.v_LPBKV[1].flatten(0, 1)
    scales = tuple(scale[1].flatten(0, 1) for scale in ours.scales)
    store(k, None if latent else v, ours.k_LPBKC[1].flatten(0, 1), v_cache, scales, slots)
    assert torch.equal(ours.k_LPBKC.float(), theirs.k_LPBKC.float())
    if ours.v_LPBKV is not None and theirs.v_LPBKV is not None:
        assert torch.equal(ours.v_LPBKV.float(), theirs.v_LPBKV.float())
    for a, b in zip(ours.scales, theirs.scales, strict=True):
        assert torch.equal(a, b)


def test_values_beyond_8_bits_saturate() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cache, most = torch.zeros(2, 1, 16, dtype=dtype), torch.finfo(dtype).max
        row = torch.tensor([1e6, -1e6]).repeat(8).view(1, 1, 16)
        store(row, None, cache, None, (), torch.tensor([1]))
        assert cache[1].float().unique().tolist() == [-most, most]


@pytest.mark.parametrize("dtype", [torch.int8, kv.INT4])
def test_a_row_of_nan_stays_nan_with_scales(dtype: torch.dtype) -> None:
    cache, scales = torch.zeros(1, 1, 16, dtype=dtype), torch.zeros(1, 1, dtype=kv.SCALED[dtype])
    row = torch.ones(1, 1, 16)
    row[0, 0, 3] = torch.inf
    store(row, None, cache, None, (scales,), torch.tensor([0]))
    assert bool(scales.isnan().all())


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=9),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 40),
    st.sampled_from([UNBOUNDED, 64]),
    st.sampled_from([(1, UNBOUNDED), (1, 1), (2, UNBOUNDED)]),
)
def test_a_plan_covers_every_block_of_every_sequence_once(
    shapes: list[tuple[int, int]], tokens: int, workers: int, min_split_len: int,
    queries: tuple[int, int],
) -> None:  # fmt: skip
    check_plan(shapes, Cut(tokens, 16, workers, min_split_len, UNBOUNDED, *queries))


def test_a_plan_of_more_sequences_than_a_block_holds() -> None:
    g = torch.Generator().manual_seed(3)
    counts = torch.where(torch.rand(2500, generator=g) < 0.01, 23, 1).tolist()
    before = torch.randint(0, 400, (2500,), generator=g).tolist()
    shapes = list(zip(counts, before, strict=True))
    check_plan(shapes, Cut(4, 16, 6000, 64, UNBOUNDED, 1, UNBOUNDED))


def check_plan(shapes: list[tuple[int, int]], cut: Cut) -> None:
    counts = torch.tensor([count for count, _ in shapes])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    kv_len = torch.tensor([count + before for count, before in shapes], dtype=torch.int32)
    num_units = cut.max_units(int(counts.sum()), len(shapes))
    memory = torch.full((Work.num_numbers(num_units, len(shapes)),), -7, dtype=torch.int32)
    work = Work.within(memory, num_units, len(shapes))
    make_plan(work, starts, kv_len, cut)
    used = int(work.num_units_1)
    assert used <= num_units
    assert set(memory[used:num_units].tolist()) <= {-7}
    expected = []
    for row, (count, before) in enumerate(shapes):
        if cut.min_queries <= count <= cut.max_queries:
            splits, part = int(work.splits_S[row]), int(work.split_len_S[row])
            assert splits * part >= count + before > (splits - 1) * part
            assert part % 16 == 0 and part >= min(64, cut.min_split_len)
            blocks = -(-count // cut.tokens)
            expected += [(row, number) for number in range(blocks * splits)]
    pairs = zip(work.unit_row_U[:used].tolist(), work.unit_number_U[:used].tolist(), strict=True)
    assert list(pairs) == expected


@given(st.integers(1, 160), st.integers(1, 8))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_every_head_and_token_has_a_row(group: int, kv_heads: int) -> None:
    site = AttentionSite(0, 0, group * kv_heads, kv_heads, 64, 64, 1.0)
    for tile in {*tiles_of(64, torch.bfloat16), *tiles_of(64, torch.bfloat16, True)}:
        shape = Shape(site, tile)
        assert shape.group_block * shape.head_blocks >= group
        assert shape.group_block * (shape.head_blocks - 1) < group
        assert 1 <= shape.tokens * shape.group_block <= tile.rows


def test_channels_in_one_or_two_blocks() -> None:
    pieces = {}
    for dim in (5, 64, 80, 96, 112, 128, 192, 256):
        pieces[dim] = channel_blocks(AttentionSite(0, 0, 1, 1, dim, dim, 1.0))
    assert pieces == {
        5: (64, 0), 64: (64, 0), 80: (128, 0), 96: (128, 0), 112: (128, 0), 128: (128, 0),
        192: (128, 64), 256: (256, 0),
    }  # fmt: skip
    latent = AttentionSite(0, 0, 16, 1, 576, 512, 1.0, latent=True)
    assert channel_blocks(latent) == (512, 64)
    assert channel_blocks(AttentionSite(0, 0, 16, 1, 96, 80, 1.0, latent=True)) == (128, 0)


def test_the_most_used_tiles_compile() -> None:
    """Now, or in the record."""
    names = {f"attention-16-bf16-same-{dim}-sm_90" for dim in (128, 576)}
    rows = compile_in_process(
        "attention_run", "--all", "--missing", "--only", f"^{'|^'.join(names)}"
    )
    known = {row["name"] for row in (*rows, *read_record().values())}
    assert all(any(name in one for one in known) for name in names)
    assert [row for row in rows if not is_good(row)] == []
