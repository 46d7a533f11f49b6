"""Prefix hits that end inside a page: what is copied, when, and for whom."""

from __future__ import annotations

import random

import pytest
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness

from radixlm.memory.prefix.base import Tail
from radixlm.wire.requests import LogprobParams


def _prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + i * i) % 30 for i in range(length)]


@pytest.mark.parametrize(("page_size", "length"), [(16, 121), (16, 11), (4, 121), (5, 24)])
@pytest.mark.parametrize("window", [0, 20])
def test_a_repeated_prompt_computes_its_last_token_only(
    page_size: int, length: int, window: int
) -> None:
    bench = SchedulerHarness(
        100, page_size=page_size, min_tail=4, window=window, num_window=100, step_tokens=256
    )
    prompt = _prompt(length)
    for rid in ("first", "again"):
        bench.submit(rid, prompt, 1, ignore_eos=True)
        bench.run()
        assert bench.out[rid] == reference(prompt, 1, True)
    tail = (length - 1) % page_size
    assert bench.cached["again"] == length - 1 - (tail if tail < 4 else 0)


@pytest.mark.parametrize(("shared", "cached"), [(19, 16), (20, 20), (27, 27), (32, 32)])
def test_fewer_tokens_than_the_least_are_computed(shared: int, cached: int) -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256)
    prompt = _prompt(50)
    bench.submit("first", prompt, 3, ignore_eos=True)
    bench.run()
    other = [*prompt[:shared], *(31 - token for token in prompt[shared:])]
    bench.submit("other", other, 3, ignore_eos=True)
    bench.run()
    assert bench.cached["other"] == cached and bench.out["other"] == reference(other, 3, True)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_page_of_a_running_request_is_copied(depth: int) -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256, depth=depth)
    prompt = _prompt(30)
    bench.submit("first", prompt, 40, ignore_eos=True)
    for _ in range(4):
        bench.tick()
    bench.submit("again", prompt, 8, ignore_eos=True)
    bench.submit("keyed", prompt, 8, ignore_eos=True, extra_key="other")
    bench.run()
    assert (bench.cached["again"], bench.cached["keyed"]) == (29, 0)
    for rid, count in (("first", 40), ("again", 8), ("keyed", 8)):
        assert bench.out[rid] == reference(prompt, count, True)


def test_a_returning_turn_finds_the_answer_too() -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256)
    prompt = _prompt(20)
    bench.submit("first", prompt, 9, ignore_eos=True)
    bench.run()
    turn = [*prompt, *bench.out["first"], 5, 6, 7]
    bench.submit("second", turn, 4, ignore_eos=True)
    bench.run()
    # nothing was computed behind the last token of the answer
    assert bench.cached["second"] == 28 and bench.out["second"] == reference(turn, 4, True)


def test_tokens_whose_logprobs_are_wanted_are_computed() -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256)
    prompt = _prompt(40)
    bench.submit("first", prompt, 2, ignore_eos=True)
    bench.run()
    bench.submit("again", prompt, 2, ignore_eos=True, logprobs=LogprobParams(prompt_from=23))
    bench.run()
    assert bench.cached["again"] == 22


def test_a_request_that_is_retracted_before_its_copy_is_forgotten() -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256)
    prompt = _prompt(30)
    bench.submit("first", prompt, 2, ignore_eos=True)
    bench.run()
    bench.submit("again", prompt, 2, ignore_eos=True)
    planner, kv_manager = bench.scheduler.planner, bench.kv_manager
    bench.scheduler._receive(0)
    (request,) = bench.scheduler.queue
    assert kv_manager.admit(request, 0) and request.num_computed == 29
    assert request.num_committed == 16 and len(kv_manager.changes.copies) == 1
    bench.scheduler.queue.start(request)
    planner.running.append(request)
    planner.retract(request)
    assert kv_manager.changes.copies == [] and kv_manager.changes.updates == []
    bench.run()
    assert bench.cached["again"] == 29 and bench.out["again"] == reference(prompt, 2, True)


def test_without_a_page_for_the_copy_the_tokens_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SchedulerHarness(page_size=16, min_tail=4, step_tokens=256)
    prompt = _prompt(30)
    bench.submit("first", prompt, 2, ignore_eos=True)
    bench.run()
    bench.submit("again", prompt, 2, ignore_eos=True)
    allocate, kv_manager = bench.kv_manager.allocate, bench.kv_manager
    monkeypatch.setattr(kv_manager, "allocate", lambda *args: False)
    bench.scheduler._receive(0)
    (request,) = bench.scheduler.queue
    kv_manager.requests[0] = None
    tail = Tail(1, 4)
    request.assign_slot(kv_manager.table, 0)
    assert kv_manager.tails is not None
    kv_manager.tails.copy(request, tail)
    assert request.num_computed == 0 and kv_manager.changes.copies == []
    request.release_slot()
    monkeypatch.setattr(kv_manager, "allocate", allocate)
    bench.run()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [0, 9])
def test_equals_one_at_a_time(seed: int, window: int) -> None:
    """Few pages, many shared beginnings, retractions: every token as if computed alone."""
    rng = random.Random(seed)
    bench = SchedulerHarness(
        rng.choice([24, 60]),
        page_size=rng.choice([4, 5, 8]),
        min_tail=rng.choice([1, 3]),
        depth=rng.choice([0, 1, 2]),
        window=window,
        num_window=60,
        reserve=0.0,
        context_len=80,
    )
    stems = [_prompt(rng.randint(1, 30), first) for first in range(3)]
    asked = []
    for i in range(30):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(1, len(stem))], *(rng.randint(1, 2) for _ in range(i % 4))]
        length = rng.randint(1, 20)
        asked.append((prompt, length))
        bench.submit(f"r{i}", prompt, length, ignore_eos=i % 2 == 0)
        for _ in range(rng.randint(0, 3)):
            bench.tick()
    bench.run()
    for i, (prompt, length) in enumerate(asked):
        assert bench.out[f"r{i}"] == reference(prompt, length, i % 2 == 0), i
    copies = [copy for plan in bench.executor.steps for copy in plan.copies]
    assert len(copies) > 3
    bench.kv_manager.prefix_cache.reset()
    assert bench.kv_manager.pages.num_free == bench.kv_manager.pages.num_total
