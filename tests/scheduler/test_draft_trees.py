"""Trees of drafts in the scheduler: further paths in pages of their own change no output, take no
page from anybody, and leave none behind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixlm.speculative.drafter import Path
from radixlm.speculative.trees import tree_proposal
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness, serve_drawn
from tests.speculative.test_drafting import KINDS, oracle, run_in_a_tight_pool


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_output_is_that_of_the_plain_run(kind: str, page_size: int, varies: bool) -> None:
    drafts = ForcedDrafts(oracle, kind, most=5, varies=varies, paths=3)
    harness = SchedulerHarness(
        num_pages=2048 // page_size, page_size=page_size, drafts=drafts, step_tokens=128
    )
    prompts = [[7 * i + j for j in range(1, 4 + i)] for i in range(6)]
    lengths = [1, 2, 5, 6, 30, 77]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        harness.submit(f"r{i}", prompt, length, ignore_eos=i % 2 == 0)
    harness.run()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert harness.out[f"r{i}"] == reference(prompt, length, ignore_eos=i % 2 == 0)
    assert (drafts.num_gained > 0) == (kind != "broken" and (kind != "oracle" or varies))


@pytest.mark.parametrize("options", [{}, {"window": 6, "num_window": 120}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("num_pages", [24, 40, 120])
def test_drawn_requests(num_pages: int, options: dict[str, int]) -> None:
    for seed in range(4):
        drafts = ForcedDrafts(oracle, "mixed", most=4, varies=True, seed=seed, paths=4)
        harness = SchedulerHarness(num_pages, drafts=drafts, step_tokens=64, **options)
        serve_drawn(harness, random.Random(seed))
        assert drafts.num_path_tokens or num_pages == 24


def test_no_request_is_retracted_for_a_path() -> None:
    """The pages fit the tokens of both requests alone."""
    drafts = ForcedDrafts(oracle, "adversary", most=4, paths=6)
    wrong = Path(np.array([1, 1], np.int32), 0, 0.5)
    drafts.others = lambda rid, most: (wrong,) * 6  # type: ignore[method-assign]
    run_in_a_tight_pool(drafts, step_tokens=64)


def test_paths_are_in_the_step_and_its_counts() -> None:
    drafts = ForcedDrafts(oracle, "adversary", most=3, paths=2)
    harness = SchedulerHarness(drafts=drafts, step_tokens=64)
    harness.submit("r", [1, 2, 3], 30, ignore_eos=True)
    harness.run()
    steps = [plan.items for plan in harness.executor.steps if plan.items.drafts is not None]
    assert any(len(items.paths) == 2 for items in steps)
    for items in steps:
        assert items.num_tokens == 1 + 3 + sum(path.count for path in items.paths) or items.paths
        for index, path in enumerate(items.paths, len(items) - len(items.paths)):
            assert items[index] is path and path.start == items.starts[0]
            assert path.tokens is not None
            assert items.drafts_of(index).tolist() == path.tokens[1:].tolist()
    rounds, drafted = harness.scheduler.drafting.counts.totals, drafts.num_path_tokens
    assert rounds.num_accepted >= drafts.num_gained > 0
    assert rounds.num_drafted > 3 * rounds.num_rounds and drafted


def test_a_tree_is_cut_into_paths() -> None:
    """Of all paths the first has the most expected tokens, and each further one adds the most."""
    chance = np.random.default_rng(3)
    for _ in range(60):
        num = int(chance.integers(1, 14))
        parents = np.array([chance.integers(-1, n) for n in range(num)], np.int32)
        survival = np.ones(num, np.float32)
        for n in range(num):
            before = survival[parents[n]] if parents[n] >= 0 else 1.0
            survival[n] = before * chance.uniform(0.1, 0.9)
        found = tree_proposal(np.arange(num, dtype=np.int32), survival, parents)
        paths = [found.tokens.tolist(), *(path.tokens.tolist() for path in found.others)]
        leaves = set(range(num)) - set(parents.tolist())
        assert {path[-1] for path in paths} == leaves
        known: set[int] = set()
        gains = [float(survival[found.tokens].sum()), *(path.gain for path in found.others)]
        shared = [0, *(path.num_shared for path in found.others)]
        for path, gain, num_shared in zip(paths, gains, shared, strict=True):
            assert [-1, *path[:-1]] == [int(parents[n]) for n in path]
            assert set(path[:num_shared]) <= known or not num_shared
            assert not set(path[num_shared:]) & known
            best = max(
                sum(float(survival[n]) for n in up(leaf, parents) if n not in known)
                for leaf in leaves
            )
            assert gain == pytest.approx(best, rel=1e-5)
            known |= set(path)
        assert known == set(range(num))


def up(node: int, parents: np.ndarray) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path
