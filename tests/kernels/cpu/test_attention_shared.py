"""Sequences that read a common prefix together get the same bits as each of them alone, also with
several new tokens (drafts) each."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu.test_attention import Case, World

SHAPES = [
    Case(()),
    Case((), dtype=torch.bfloat16, heads=6, kv_heads=1, dim=64, v_dim=48, page_size=32),
    Case((), dtype=torch.int8, softcap=3.0, has_sinks=True, page_size=64),
    Case((), dtype=torch.float8_e4m3fn, page_size=128),
    Case((), dtype=torch.bfloat16, heads=40, kv_heads=1),
    Case((), dtype=torch.bfloat16, heads=20, kv_heads=1, dim=72, v_dim=64, is_latent=True),
    Case((), heads=16, kv_heads=1, dim=40, v_dim=24, is_latent=True),
    Case((), window=200, dtype=torch.bfloat16),
    Case((), has_slopes=True),
]


def forked(case: Case, forks: list[tuple[int, int, int]], seed: int) -> World:
    """A world where sequence i starts with pages of an earlier one. `forks`: (total tokens, the
    earlier sequence, percent of its tokens)."""
    world = World(replace(case, lens=tuple((1, total) for total, _, _ in forks)), seed)
    for s, (total, earlier, percent) in enumerate(forks):
        if s == 0:
            continue
        parent = earlier % s
        tokens = min(total, world.total[parent]) * percent // 100
        num = tokens // case.page_size
        world.pages[s, :num] = world.pages[parent, :num]
    return world


def assert_same(world: World, lens: list[tuple[int, int]], threads: int) -> None:
    together = world.run(lens, threads)
    for s, (new, total) in enumerate(lens):
        alone = world.layer.run(
            world.q[s][total - new : total], *world.caches, world.pages[s : s + 1],
            torch.tensor([0, new], dtype=torch.int32), torch.tensor([total], dtype=torch.int32),
        )  # fmt: skip
        assert torch.isfinite(alone).all()
        assert torch.equal(together[s], alone), s


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prefix_for_all(case: Case, threads: int) -> None:
    """A long prefix and 20 readers: whole splits, a partial split, tails of several splits."""
    forks = [(1300, 0, 0), *((700 + 40 * s, 0, 80 + s % 3 * 7) for s in range(1, 20))]
    world = forked(case, forks, seed=1)
    assert_same(world, list(world.case.lens), threads)


@pytest.mark.parametrize("case", SHAPES)
def test_drafts_behind_a_prefix(case: Case) -> None:
    """Up to eight new tokens a sequence, more rows than one task holds, tails of several splits."""
    forks = [(1300, 0, 0), *((600 + 70 * s, 0, 75 + s % 4 * 8) for s in range(1, 14))]
    world = forked(case, forks, seed=4)
    assert_same(world, [(1 + 3 * s % 8, total) for s, (total, _, _) in enumerate(forks)], 2)


def test_shared_prefixes_next_to_chunks_of_prompts() -> None:
    world = forked(
        Case((), dtype=torch.bfloat16), [(900, 0, 0), (900, 0, 99), (900, 0, 99)], seed=2
    )
    for lens in (
        [(1, 900), (40, 900), (1, 899)],
        [(200, 900), (1, 900), (1, 900)],
        [(4, 900), (90, 900), (7, 899)],
    ):
        assert_same(world, lens, 2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(SHAPES[:7]),
    forks=st.lists(
        st.tuples(st.integers(1, 1200), st.integers(0, 20), st.integers(0, 100)),
        min_size=2, max_size=9,
    ),
    most_new=st.integers(1, 9),
    threads=st.integers(1, 2),
)  # fmt: skip
def test_any_tree_of_prefixes(
    case: Case, forks: list[tuple[int, int, int]], most_new: int, threads: int
) -> None:
    world = forked(case, forks, seed=3)
    lens = [(min(total, 1 + s % most_new), total) for s, (total, _, _) in enumerate(forks)]
    assert_same(world, lens, threads)
