"""The scheduler of several pipeline stages: steps in flight have disjoint requests."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from radixlm.step.plan import Items
from radixlm.wire.requests import AbortRequest
from tests.fakes.executor import StagedExecutor, reference
from tests.fakes.scheduler_harness import SchedulerHarness, serve_drawn


def staged(stages: int, **options: Any) -> SchedulerHarness:
    return SchedulerHarness(stages=stages, depth=stages - 1, **options)


def executor_of(bench: SchedulerHarness) -> StagedExecutor:
    assert isinstance(bench.executor, StagedExecutor)
    return bench.executor


CASES = list(product((2, 3, 5), (True, False), (30, 400), ("plain", "window", "states")))


@pytest.mark.parametrize(("stages", "radix", "num_pages", "kind"), CASES)
def test_equals_one_at_a_time(stages: int, radix: bool, num_pages: int, kind: str) -> None:
    """With chunks, prefix hits, retractions and few pages."""
    rng = random.Random(stages * num_pages)
    options = {
        "plain": {},
        "window": {"window": 9, "num_window": 60},
        "states": {"states": True, "num_window": 90, "waits_for_chunks": True},
    }[kind]
    bench = staged(stages, num_pages=num_pages, radix=radix, **options)
    serve_drawn(bench, rng)


@pytest.mark.parametrize(("stages", "count", "sizes"), [(2, 8, {4}), (3, 8, {2, 3}), (4, 3, {1})])
def test_requests_that_decode_are_divided_evenly(stages: int, count: int, sizes: set[int]) -> None:
    """All of them come in turn, though they began in one step."""
    bench = staged(stages, num_pages=400)
    for i in range(count):
        bench.submit(f"r{i}", [i + 1], 200, ignore_eos=True)
    for _ in range(40):
        bench.tick()
    start = len(bench.executor.steps)
    for _ in range(60):
        bench.tick()
    steps = bench.executor.steps[start:]
    turns = Counter(rid for step in steps for rid in Items.of(step.items).decodes.rids)
    assert set(executor_of(bench).sizes[start:]) <= sizes
    assert len(turns) == count and max(turns.values()) - min(turns.values()) <= 1
    assert len(bench.scheduler.inflight) == min(stages, count) - 1


def test_a_micro_batch_has_a_maximum() -> None:
    bench = staged(2, num_pages=400, max_micro_batch=3)
    for i in range(8):
        bench.submit(f"r{i}", [i + 1] * 3, 20, ignore_eos=True)
    bench.run()
    assert max(len(plan.items) for plan in bench.executor.steps) == 3
    for i in range(8):
        assert bench.out[f"r{i}"] == reference([i + 1] * 3, 20, True)


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Their tokens are known, so that a prompt fills all stages."""
    bench = staged(3)
    bench.submit("r", [1 + i % 30 for i in range(64)], 2)  # of 16 tokens a step
    for ticks in range(1, 4):
        bench.tick()
        assert len(bench.executor.steps) == ticks
    assert len(bench.scheduler.inflight) == 2
    bench.run()
    recurrent = staged(3, states=True, num_window=20, waits_for_chunks=True)
    recurrent.submit("r", [1 + i % 30 for i in range(64)], 2)
    for _ in range(3):
        recurrent.tick()
    assert len(recurrent.scheduler.inflight) <= 1
    recurrent.run()


@pytest.mark.parametrize(
    ("stages", "length", "chunk"), [(2, 1600, 200), (2, 300, 64), (3, 3200, 200)]
)
def test_a_long_prompt_keeps_all_stages_at_work(stages: int, length: int, chunk: int) -> None:
    """Though it would fit into one step."""
    room = {"step_tokens": 2048, "max_prefill_tokens": 2048, "context_len": 4096}
    bench = staged(stages, num_pages=2000, **room)
    prompt = [1 + i % 30 for i in range(length)]
    bench.submit("r", prompt, 3, ignore_eos=True)
    bench.run()
    counts = [item.count for plan in bench.executor.steps for item in Items.of(plan.items).prefills]
    assert counts[:-1] == [chunk] * (len(counts) - 1) and sum(counts) == length
    assert bench.out["r"] == reference(prompt, 3, True)


def test_prompts_are_cut_together() -> None:
    """Sixteen that fit into one step pass the stages in eight."""
    room = {"step_tokens": 2048, "max_prefill_tokens": 2048, "context_len": 4096}
    bench = staged(2, num_pages=2000, max_running=16, **room)
    prompts = {f"r{i}": [1 + (i + t) % 30 for t in range(100)] for i in range(16)}
    for rid, prompt in prompts.items():
        bench.submit(rid, prompt, 2, ignore_eos=True)
    bench.run()
    counts = [sum(i.count for i in Items.of(p.items).prefills) for p in bench.executor.steps]
    assert [count for count in counts if count] == [200] * 8
    assert all(bench.out[rid] == reference(prompt, 2, True) for rid, prompt in prompts.items())


def test_a_request_may_be_aborted_in_any_stage() -> None:
    for tick in range(1, 8):
        bench = staged(3)
        for i in range(4):
            bench.submit(f"r{i}", [i + 1] * 20, 30, ignore_eos=True)
        for _ in range(tick):
            bench.tick()
        bench.mine.send(AbortRequest(rids=["r0", "r2"]))
        bench.run()
        for i in (1, 3):
            assert bench.out[f"r{i}"] == reference([i + 1] * 20, 30, True)
        assert bench.finish["r0"].kind == bench.finish["r2"].kind == "abort"


def test_retractions_with_work_in_all_stages_change_no_token() -> None:
    bench = staged(3, num_pages=24, reserve=0.0)
    prompts = [[i + 1] * 8 for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 40, ignore_eos=True)
    bench.run()
    assert bench.scheduler.planner.num_retracted > 0
    for i, prompt in enumerate(prompts):
        assert bench.out[f"r{i}"] == reference(prompt, 40, True)
