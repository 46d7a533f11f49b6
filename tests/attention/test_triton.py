"""The Triton backend in the interpreter against torch_native: all kinds of sites, caches and
steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.paged_step import make_batch, new_rows, open_backend, run_step
from tests.fakes.attention_case import CPU, Case
from torch import Tensor

from radixlm.base.record import replace

pytest.importorskip("triton")

from radixlm.attention import triton as backend_module
from radixlm.attention.select import make_backend
from radixlm.base.errors import ConfigError, InvariantError
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops import kv
from radixlm.kernels.ops.rope import QkNorm, prepare_qk
from radixlm.kernels.triton import attention_run
from radixlm.kernels.triton.attention_run import UNBOUNDED, tiles_of
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite

SITE = AttentionSite(layer=1, group=0, heads=4, kv_heads=2, head_dim=16, v_dim=16, scale=0.3)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.3])
SITES = {
    "plain": SITE,
    "window": replace(SITE, window=5),
    "chunk": replace(SITE, chunk=7),
    "gemma2": replace(SITE, window=40, softcap=2.0),
    "gpt-oss": replace(SITE, window=40, sinks=SINKS),
    "alibi": replace(SITE, slopes=SLOPES),
    "everything": replace(SITE, window=9, softcap=1.5, sinks=SINKS, slopes=SLOPES),
    "one head each": replace(SITE, kv_heads=4),
    "one for 4": replace(SITE, kv_heads=1),
    "one for 7": replace(SITE, heads=7, kv_heads=1),
    "one for 8": replace(SITE, heads=8, kv_heads=1),
    "one for 20": replace(SITE, heads=20, kv_heads=1),
    "deepseek": replace(SITE, kv_heads=1, head_dim=144, v_dim=128, latent=True),
    "small latent": replace(SITE, kv_heads=1, head_dim=24, v_dim=20, latent=True),
    "narrow values": replace(SITE, v_dim=5),
    "wide values": replace(SITE, v_dim=40),
    "80 channels": replace(SITE, head_dim=80, v_dim=80, kv_heads=4),
    "112 channels": replace(SITE, head_dim=112, v_dim=112, kv_heads=4),
}
STEPS = {  # (query tokens, tokens before) of each sequence
    "decode": [(1, 0), (1, 16), (1, 99)],
    "guesses": [(3, 80), (5, 0)],
    "mixed": [(1, 30), (33, 50), (1, 0)],
}
# the smallest tile suffices: shapes, and parts of "everything", which uses the largest tile
SMALL = (
    *("gemma2", "gpt-oss", "alibi", "one head each", "one for 4", "one for 8", "one for 20"),
    *("small latent", "narrow values", "wide values", "80 channels", "112 channels"),
)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of few tokens, so that short sequences have several."""
    monkeypatch.setattr(attention_run, "DECODE_LEN", 64)
    monkeypatch.setattr(attention_run, "EXTEND_LEN", 64)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, "guesses" if name in SMALL else "mixed") for name in SITES),
        *((name, "decode") for name in ("plain", "everything", "one for 7", "deepseek")),
        *((name, "guesses") for name in ("plain", "everything", "deepseek")),
    ],
)
def test_equals_torch_native(name: str, step: str) -> None:
    case = Case.random(SITES[name], STEPS[step], 4, 1)
    ours, theirs = (run_step(b, case, SITES[name]) for b in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_any_page_size(page_size: int) -> None:
    case = Case.random(SITE, [(1, 90), (9, 11)], page_size, 2)
    ours, theirs = (run_step(b, case, SITE) for b in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "deepseek"])
@pytest.mark.parametrize("cache", kv.DTYPES, ids=str)
def test_every_kind_of_cache(cache: torch.dtype, name: str) -> None:
    """K and V that the cache represents exactly, because the interpreter rounds to 16 and 8 bits
    wrongly."""
    case = Case.random(SITES[name], [(1, 40), (9, 33)], 4, 3, cache_dtype=cache)
    if cache not in kv.SCALED:
        k, v = ([x.to(cache).float() for x in rows] for rows in (case.k, case.v))
        case = replace(case, k=k, v=v)
    ours, theirs = (run_step(b, case, SITES[name]) for b in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_near_single_precision(dtype: torch.dtype) -> None:
    case = Case.random(SITE, [(1, 90), (20, 11)], 4, 4, cache_dtype=dtype)
    ours = run_step("triton", case, SITE, dtype)
    assert ours.dtype == dtype
    exact = run_step("torch_native", case, SITE)
    assert float((ours.float() - exact).norm() / exact.norm()) < 1e-2


def test_a_group_of_64_heads_shares_its_latents() -> None:
    """More heads than rows in a tile; latents of the published shape, 512 + 64 channels."""
    site = replace(SITE, heads=64, kv_heads=1, head_dim=576, v_dim=512, latent=True, scale=0.04)
    case = Case.random(site, [(1, 70)], 16, 5)
    ours, theirs = (run_step(b, case, site) for b in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_long_sequence_in_a_batch_of_short_ones_is_cut() -> None:
    case = Case.random(SITE, [(1, 270), *([(1, 2)] * 3)], 16, 6)
    ours, theirs = (run_step(b, case, SITE) for b in ("triton", "torch_native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    backend, table = open_backend("triton", case, SITE)
    backend.begin(make_batch(case, table, backend))
    backend.run(*new_rows(case, SITE, torch.float32), SITE)
    (prepared,) = backend._prepared.values()
    splits = prepared[0].work.splits_S.tolist()
    assert splits[0] > 1 and splits[1:] == [1] * 3


def test_layers_without_kv_read_those_of_other_layers() -> None:
    case = Case.random(SITE, [(5, 11), (1, 30)], 4, 7)
    reader = replace(SITE, heads=8, window=6, stores=False)
    wide = [torch.randn(len(q), 8, 16) for q in case.q]
    outs = []
    for name in ("triton", "torch_native"):
        backend, table = open_backend(name, case, SITE)
        backend.begin(make_batch(case, table, backend))
        backend.run(*new_rows(case, SITE, torch.float32), SITE)
        outs.append(backend.run(torch.cat(wide), None, None, reader))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window"])
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_bidirectional_spans(name: str, looks_ahead: bool) -> None:
    site = replace(SITES[name], looks_ahead=looks_ahead)
    case = Case.random(site, [(40, 12), (1, 9), (37, 0)], 4, 10)
    bidirectional_spans = ((3, 20), (43, 34))
    ours, theirs = (
        run_step(b, case, site, bidirectional_spans=bidirectional_spans)
        for b in ("triton", "torch_native")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bidirectional_spans_that_ignore_the_window() -> None:
    """A span starts its sequence; the decode between them keeps its window."""
    site = SITES["window"]
    case = Case.random(site, [(40, 0), (1, 19), (37, 0)], 4, 10)
    ours, theirs = (
        run_step(b, case, site, bidirectional_spans=((0, 40), (41, 37)), ignores_window=True)
        for b in ("triton", "torch_native")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_padding_rows_change_no_other_row() -> None:
    """Padding as in a graph: rows without tokens and store slots of -1 after the batch."""
    case = Case.random(SITE, [(1, 149), (1, 40)], 4, 11)
    alone = run_step("triton", case, SITE)
    backend, table = open_backend("triton", case, SITE)
    batch = make_batch(case, table, backend)
    before = backend.pools[0].k_LPBKC.clone()
    padded = dataclasses.replace(
        batch,
        token_ids_T=torch.zeros(4, dtype=torch.int64),
        positions_T=torch.tensor([149, 40, 0, 0]),
        query_start_S1=torch.arange(5, dtype=torch.int32),
        kv_len_S=torch.tensor([150, 41, 0, 0], dtype=torch.int32),
        page_table_GSP=(torch.cat([table, table.new_full((2, table.shape[1]), 1 << 30)]),),
        store_GT=(torch.cat([batch.store_GT[0], torch.tensor([-1, -1])]),),
    )
    backend.begin(padded)
    q, k, v = new_rows(case, SITE, torch.float32)
    rows = [torch.cat([x, torch.full_like(x, 7.0)]) for x in (q, k, v) if x is not None]
    out = backend.run(*rows, SITE)
    assert torch.equal(out[:2], alone)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    changed = backend.pools[0].k_LPBKC.nan_to_num(9) != before.nan_to_num(9)
    assert int(changed.any(-1).any(-1).sum()) == 2


def test_replayed_launches_follow_the_lengths() -> None:
    """Same launches and memory with other lengths in it: only values on the device may count."""
    case = Case.random(SITE, [(1, 139), (1, 40)], 4, 12)
    backend, table = open_backend("triton", case, SITE)
    batch = make_batch(case, table, backend)
    backend.begin(batch)
    q, k, v = new_rows(case, SITE, torch.float32)
    backend.run(q, k, v, SITE)
    (first,) = backend._prepared.values()
    grid = [(launch.num_units, launch.work.splits_S.data_ptr()) for launch in first]
    batch.kv_len_S.copy_(torch.tensor([23, 41]))
    backend.begin(batch)
    out = backend.run(q, None, None, replace(SITE, stores=False))
    (again,) = backend._prepared.values()
    assert [(launch.num_units, launch.work.splits_S.data_ptr()) for launch in again] == grid
    short = Case(case.q, [case.k[0][:23], case.k[1]], [case.v[0][:23], case.v[1]], 4, 12)
    torch.testing.assert_close(out, run_step("torch_native", short, SITE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window", "everything", "deepseek"])
def test_a_token_has_the_same_bits_in_every_batch(name: str) -> None:
    """Beside others, alone, in a shorter chunk and as a decode."""
    site = SITES[name]

    def run(case: Case) -> Tensor:
        return run_step("triton", case, site, prepare=lambda b: b.keep_batch_invariant())

    case = Case.random(site, [(1, 139), (37, 70), (1, 3)], 16, 13)
    whole = run(case).split([1, 37, 1])
    for row, wanted in enumerate(whole):
        assert torch.equal(run(Case([case.q[row]], [case.k[row]], [case.v[row]], 16, 14)), wanted)
    k, v, q = case.k[1], case.v[1], case.q[1]
    chunk = Case([q[:20]], [k[:-17]], [v[:-17]], 16, 15)
    assert torch.equal(run(chunk), whole[1][:20])
    assert torch.equal(run(Case([q[-1:]], [k], [v], 16, 16)), whole[1][-1:])


def test_a_step_takes_the_smallest_tile_that_holds_its_sequences() -> None:
    def rows(shapes: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
        case = Case.random(SITE, shapes, 4, 0)
        backend, table = open_backend("triton", case, SITE)
        tiles = tiles_of(SITE.head_dim, torch.bfloat16)
        found = backend_module.phases(SITE, tiles, make_batch(case, table, backend), has_tree=False)
        return [(tile.rows, queries) for tile, queries in found]

    every = (1, UNBOUNDED)
    assert rows([(1, 5), (1, 9)]) == [(16, every)]
    assert rows([(8, 5), (1, 9)]) == [(16, every)]
    assert rows([(9, 5), (1, 9)]) == [(16, (1, 1)), (128, (2, UNBOUNDED))]
    assert rows([(40, 5), (40, 9)]) == [(128, every)]
    assert rows([(40, 5), (1, 9)]) == [(16, (1, 1)), (128, (2, UNBOUNDED))]
    assert [tile.rows for tile in tiles_of(576, torch.bfloat16)] == [16, 32]


def test_memory_that_a_graph_may_read_is_never_freed() -> None:
    memory = backend_module.Workspace(CPU)
    first = memory.take("x", 4, torch.int32)
    assert memory.take("x", 3, torch.int32).data_ptr() == first.data_ptr()
    first.fill_(7)
    assert memory.take("x", 5, torch.int32).data_ptr() != first.data_ptr()
    assert memory._retired[0].data_ptr() == first.data_ptr()


def test_wide_heads_are_refused() -> None:
    group = KvGroup(0, "full", (0,), 1, 640, 640)
    with pytest.raises(ConfigError, match=r"heads of 640 .*torch_native"):
        make_backend("triton", (group,), bind("cpu", {"all": "reference"}), CPU)


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "interpreting", lambda: False)
    with pytest.raises(ConfigError, match=r"backend triton: .*GPU.*torch_native works"):
        make_backend("triton", (), bind("cpu", {"all": "reference"}), CPU)


@pytest.mark.parametrize(
    "cache", [torch.float32, torch.float8_e4m3fn, torch.int8, kv.INT4], ids=str
)
@pytest.mark.parametrize("kind", ["head", "row", ""])
def test_norms_rotation_and_store_are_one_launch(
    kind: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotation and store in one launch, for caches without scales, equal the separate
    steps."""
    case = Case.random(SITE, [(1, 21), (4, 9)], 4, 15, cache_dtype=cache)
    weights = [torch.rand(n) + 0.5 for n in ((64, 32) if kind == "row" else (16, 16))]
    norm = QkNorm(kind, False, 1e-6, *weights) if kind else None  # type: ignore[arg-type]
    angle = torch.rand(5, 8)
    outs, caches = [], []
    for name in ("triton", "torch_native"):
        backend, table = open_backend(name, case, SITE, kernels=bind("cpu", {"all": "triton"}))
        batch = make_batch(case, table, backend)
        backend.begin(batch)
        asked = (norm, torch.cat((angle.cos(), angle.sin()), -1), False)
        q, k, v = new_rows(case, SITE, torch.float32)
        assert q is not None and k is not None and v is not None
        if name == "triton":
            assert batch.fused_attn is backend
            if cache not in kv.SCALED:
                monkeypatch.setattr(backend_module, "store", None)
            outs.append(backend.prepare_and_run(q, k, v, SITE, *asked))
        else:
            assert batch.fused_attn is None
            prepare_qk(q, k, *asked)
            outs.append(backend.run(q, k, v, SITE))
        caches.append(backend.pools[0].load(SITE.layer, batch.store_GT[0], torch.float32)[0])
    torch.testing.assert_close(*outs, rtol=2e-2 if cache.itemsize == 1 else 1e-4, atol=1e-2)
    torch.testing.assert_close(*caches, rtol=0.07 if cache.itemsize == 1 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("source", [[2, 0, 5], [1, 4, 2]])
def test_pages_are_copied_as_by_indexing(source: list[int]) -> None:
    group = KvGroup(0, "full", (0, 1), 2, 16, 8)
    pools = []
    for name in ("triton", "torch_native"):
        backend = make_backend(name, (group,), bind("cpu", {"all": "reference"}), CPU)
        pool = backend.make_pool(group, 8, 4, torch.int8)
        for tensor in (pool.k_LPBKC, pool.v_LPBKV, *pool.scales):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 127)
        pool.copy_pages(source, [5, 2, 7])
        pools.append((pool.k_LPBKC, pool.v_LPBKV, *pool.scales))
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(ours, theirs)


def test_pages_that_cannot_be_copied_are_an_error() -> None:
    group = KvGroup(0, "full", (0, 1), 2, 16, 8)
    backend = make_backend("triton", (group,), bind("cpu", {"all": "reference"}), CPU)
    pool = backend.make_pool(group, 8, 4, torch.float32)
    pool.k_LPBKC = pool.k_LPBKC.transpose(2, 3)
    with pytest.raises(InvariantError, match="cannot be copied"):
        pool.copy_pages([1], [2])
