"""Data-parallel attention: one scheduler, a KV cache for each group of ranks."""

from __future__ import annotations

import random

import pytest
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness

from radixlm.engine.features.arrival_groups import pages_of_prompts
from radixlm.self_check.kv_cache import find_violations, repair


def prompts(seed: int, count: int, most: int = 40) -> dict[str, list[int]]:
    """Some of which share prefixes."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 31) for _ in range(20)] for _ in range(3)]
    drawn: dict[str, list[int]] = {}
    for i in range(count):
        tail = [rng.randrange(1, 31) for _ in range(rng.randint(1, most))]
        drawn[f"r{i}"] = (rng.choice(stems) if rng.random() < 0.6 else []) + tail
    return drawn


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pages": 24},  # retraction
        {"radix": False, "num_pages": 30},
        {"window": 8, "num_window": 24},
        {"states": True, "num_window": 40},
        {"groups": 4},
        {"policy": "lpm"},
    ],
)
def test_tokens_are_those_of_each_request_alone(seed: int, options: dict[str, object]) -> None:
    bench = SchedulerHarness(**{"groups": 2, **options})  # type: ignore[arg-type]
    drawn = prompts(seed, 20)
    for rid, prompt in drawn.items():
        bench.submit(rid, prompt, 12)
        if random.Random(rid).random() < 0.5:
            bench.tick()
    bench.run()
    assert bench.out == {rid: reference(prompt, 12) for rid, prompt in drawn.items()}


def test_drafts_of_several_groups_are_verified_together() -> None:
    drawn = prompts(7, 12)
    bench = SchedulerHarness(groups=2, drafts=ForcedDrafts(3))
    for rid, prompt in drawn.items():
        bench.submit(rid, prompt, 12)
    bench.run()
    assert bench.out == {rid: reference(prompt, 12) for rid, prompt in drawn.items()}


def groups_of(bench: SchedulerHarness) -> dict[str, int]:
    """The group to which each request was given at first."""
    found: dict[str, int] = {}
    for plan in bench.executor.steps:
        for admission in plan.admissions:
            found.setdefault(admission.rid, admission.slot // bench.executor.per_group)
    return found


def test_requests_spread_over_groups_and_follow_their_prefix() -> None:
    bench = SchedulerHarness(groups=2)
    bench.submit("a", [1] * 64, 2, ignore_eos=True)
    bench.run()
    bench.submit("b", [2] * 16, 40, ignore_eos=True)  # the other group is empty
    bench.tick()
    bench.submit("c", [1] * 64 + [5], 2)  # its prefix lies with a
    bench.submit("d", [3] * 16, 2)  # c needs more pages than b
    bench.run()
    groups = groups_of(bench)
    assert groups["a"] == groups["c"] and bench.cached["c"] == 64
    assert groups["b"] == groups["d"] != groups["a"]


def test_requests_one_after_the_other_fill_the_caches_of_all_groups() -> None:
    bench = SchedulerHarness(groups=2)
    for rid, token in (("a", 1), ("b", 2)):
        bench.submit(rid, [token] * 16, 2, ignore_eos=True)
        bench.run()
    assert set(groups_of(bench).values()) == {0, 1}


def test_requests_of_one_prefix_use_all_groups() -> None:
    bench = SchedulerHarness(groups=2)
    bench.submit("first", [1] * 16, 2, ignore_eos=True)
    bench.run()
    for n in range(8):
        bench.submit(f"{n}", [1] * 16 + [n + 2], 40, ignore_eos=True)
    bench.run()
    groups = [group for rid, group in groups_of(bench).items() if rid != "first"]
    assert 3 <= groups.count(0) <= 5


def test_a_group_out_of_pages_takes_none_of_the_other() -> None:
    """One group is full; retraction there leaves the other group's requests alone."""
    bench = SchedulerHarness(groups=2, num_pages=16, max_running=8)
    for rid in "abcd":
        bench.submit(rid, [ord(rid) % 30 + 1] * 24, 24, ignore_eos=True)
    bench.run()
    for plan in bench.executor.steps:
        for update in plan.pages:
            assert update.pages.max(initial=0) <= 16
    assert bench.out == {
        rid: reference([ord(rid) % 30 + 1] * 24, 24, ignore_eos=True) for rid in "abcd"
    }
    assert bench.scheduler.planner.num_retracted > 0


def test_a_prompt_that_no_group_has_room_for_is_refused() -> None:
    bench = SchedulerHarness(groups=2, num_pages=16, max_running=8)
    capacity = bench.kv_manager.parts[0].num_total_tokens
    long, longest = [5] * capacity, [5] * (capacity - 1)
    for rid, prompt in (("long", long), ("longest", longest)):
        bench.submit(rid, prompt, 1, ignore_eos=True)
    bench.run()
    assert bench.out == {"long": [], "longest": reference(longest, 1, ignore_eos=True)}
    assert f"the KV cache holds {capacity}: raise" in (bench.finish["long"].message or "")


def test_figures_are_of_all_groups_and_a_leak_is_mended() -> None:
    bench = SchedulerHarness(groups=2)
    bench.submit("a", [1] * 20, 2)
    bench.run()
    manager = bench.kv_manager
    load = bench.scheduler.load(bench.now_s)
    assert load.num_total_tokens == 2 * manager.parts[0].num_total_tokens
    assert load.num_used_tokens == 0
    leaked = manager.parts[1].pages.alloc(3)
    assert leaked is not None and manager.parts[1].slots.alloc() == bench.executor.per_group
    assert len(find_violations(manager)) == 2
    repair(manager)
    assert find_violations(manager) == []
    assert manager.parts[1].slots.num_free == bench.executor.per_group


def test_pages_for_prompts_are_kept_in_their_own_group() -> None:
    bench = SchedulerHarness(groups=2, step_tokens=4)
    bench.submit("a", list(range(1, 41)), 2)
    bench.tick()
    parts = bench.kv_manager.parts
    assert [pages_of_prompts(part) for part in parts] == [9, 0]
