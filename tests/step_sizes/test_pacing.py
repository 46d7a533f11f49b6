"""Chunks of prompts beside requests that decode keep to the time that these are to have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness

from radixlm.scheduler.plan_parts import LEAST, LEAST_EVEN, even_chunk
from radixlm.step.plan import Items
from radixlm.step_sizes import pacing
from radixlm.step_sizes.pacing import FIRST, TIMES, UNNOTICED_S, ChunkPacer
from radixlm.wire.requests import AbortRequest

BASE_S, EACH_S = 1e-3, 5e-6


class TimedHarness(SchedulerHarness):
    """A step takes longer by its tokens, and by how far they are from the start."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(
            num_pages=2200, step_tokens=1024, max_prefill_tokens=4096, context_len=8192, **limits
        )
        self.steps: list[tuple[int, int, float]] = []  # decodes, tokens of prompts, seconds
        forward = self.executor.forward

        def timed(plan: Any) -> Any:
            items = Items.of(plan.items)
            costs = [item.count * EACH_S * (1 + item.start / 4096) for item in items.prefills]
            num_tokens = sum(item.count for item in items.prefills)
            self.steps.append((len(items.starts), num_tokens, BASE_S + sum(costs)))
            self.now_s += self.steps[-1][2]
            return forward(plan)

        self.executor.forward = timed


@pytest.mark.parametrize("depth", [0, 1])
def test_running_requests_get_their_tokens_in_time(depth: int) -> None:
    target_s = 3e-3
    bench = TimedHarness(target_itl_s=target_s, depth=depth)
    prompt = [3 + i % 50 for i in range(6000)]
    bench.submit("runs", [1, 2, 3], 200, ignore_eos=True)
    for _ in range(5):
        bench.tick()
    bench.submit("long", prompt, 4, ignore_eos=True)
    bench.run()
    assert bench.out["runs"] == reference([1, 2, 3], 200, True)
    assert bench.out["long"] == reference(prompt, 4, True)
    beside = [step for step in bench.steps[5:] if step[1]]
    settled = beside[2:-1]
    assert len(settled) > 5 and max(step[2] for step in settled) < 1.2 * target_s
    late = settled[len(settled) // 2 :]  # with a step in flight the first times are of others
    # a tick takes a millisecond more, which counts between two steps in flight
    took_s = sum(step[2] for step in late) / len(late) + 1e-3 * depth
    assert took_s > 0.85 * target_s, "and no slower than needed"


@pytest.mark.parametrize("stages", [2, 3])
def test_tokens_come_in_time_through_several_stages(stages: int) -> None:
    """Each request decodes in one of ``stages`` steps."""
    target_s = 2e-3 * stages
    bench = TimedHarness(target_itl_s=target_s / stages, stages=stages, depth=stages - 1)
    prompt, names = [3 + i % 50 for i in range(6000)], [f"r{i}" for i in range(2 * stages)]
    for name in names:
        bench.submit(name, [1, 2, 3], 60, ignore_eos=True)
    for _ in range(9):
        bench.tick()
    bench.submit("long", prompt, 4, ignore_eos=True)
    came_s: list[float] = []
    while len(bench.out[names[0]]) < 60:
        before = len(bench.out[names[0]])
        bench.tick()
        came_s += [bench.now_s] * (len(bench.out[names[0]]) - before)
    bench.run()
    gaps_s = [late - early for early, late in pairwise(came_s)]
    # a tick takes a millisecond of its own
    assert max(gaps_s[4:]) < 1.2 * target_s + 1e-3 * stages
    assert bench.out["long"] == reference(prompt, 4, True)


@pytest.mark.parametrize("is_read", [True, False])
def test_without_a_target_readers_are_spared(monkeypatch: Any, is_read: bool) -> None:
    """A step with a prompt takes at most TIMES one without, where somebody reads."""
    monkeypatch.setattr(pacing, "UNNOTICED_S", 0.0)
    bench = TimedHarness(target_itl_s=None)
    bench.submit("runs", [1, 2, 3], 100, ignore_eos=True, stream=is_read)
    for _ in range(5):
        bench.tick()
    bench.submit("long", [3 + i % 50 for i in range(6000)], 4, ignore_eos=True)
    bench.run()
    beside = [step for step in bench.steps[5:] if step[0] and step[1]]
    if is_read:
        settled = [step[2] for step in beside[2:-1]]
        assert len(settled) > 5 and 0.88 * TIMES < max(settled) / BASE_S < 1.2 * TIMES
    else:
        assert beside[0][1] == 1023, "a whole chunk"


@given(st.floats(1e-4, 1.0))
def test_the_time_that_readers_bear(base_s: float) -> None:
    pacer = ChunkPacer(None)
    assert pacer.target_s(1) == UNNOTICED_S, "while nothing is known"
    pacer.observe(1, 0, base_s)
    assert pacer.target_s(1) == max(UNNOTICED_S, TIMES * base_s)
    pacer.observe(1, 0, 2 * base_s)  # something came between
    assert pacer.target_s(1) <= max(UNNOTICED_S, 1.11 * TIMES * base_s)


@pytest.mark.parametrize("target_s", [2e-3, None])
def test_a_prompt_alone_takes_whole_chunks(target_s: float | None) -> None:
    bench = TimedHarness(target_itl_s=target_s)
    bench.submit("long", [3] * 5000, 2, ignore_eos=True)
    bench.run()
    assert [step[1] for step in bench.steps if step[1]][:4] == [1024] * 4


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_is_cancelled_computes_no_further_chunk(depth: int) -> None:
    bench = TimedHarness(depth=depth)
    bench.submit("runs", [1, 2, 3], 30, ignore_eos=True)
    bench.submit("long", [3] * 7000, 2, ignore_eos=True)
    for _ in range(4):
        bench.tick()
    assert 1024 < sum(step[1] for step in bench.steps) < 5000
    bench.mine.send(AbortRequest(rids=("long",)))
    num_steps = len(bench.steps)
    bench.run()
    assert bench.finish["long"].kind == "abort" and bench.out["runs"] == reference(
        [1, 2, 3], 30, True
    )
    assert not any(step[1] for step in bench.steps[num_steps:])


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_no_step_of_a_long_prompt_takes_longer_than_its_first(num_prompts: int) -> None:
    bench = TimedHarness(attention_length=4096)
    prompts = [[3 + (i * k) % 50 for i in range(7900 // num_prompts)] for k in (1, 3, 7)]
    for number in range(num_prompts):
        bench.submit(str(number), prompts[number], 2, ignore_eos=True)
    bench.run()
    for number in range(num_prompts):
        assert bench.out[str(number)] == reference(prompts[number], 2, True)
    # the harness takes a chunk's context at its start alone
    steps = [step[2] for step in bench.steps if step[1]]
    assert len(steps) > 9 and max(steps) < 1.2 * steps[0]
    assert min(steps[:-2]) > 0.75 * steps[0], "and whole chunks are as long as they may be"


@given(st.integers(1, 1 << 20), st.integers(1, 8192), st.floats(100, 20_000))
def test_even_chunks_cost_the_same(start: int, tokens: int, length: float) -> None:
    count = even_chunk(start, tokens, length)
    cost, whole = count * (length + start + count / 2), tokens * (length + tokens / 2)
    assert 0 < count <= tokens
    if count > LEAST_EVEN:
        assert cost <= whole * (1 + 1e-9)
        assert count == tokens or (count + LEAST) * (length + start + count / 2 + LEAST) > whole


@given(st.integers(1, 32), st.integers(1, 32))
def test_a_step_of_many_decodes_takes_longer_without_prompts_too(before: int, num: int) -> None:
    """TIMES counts from what these decodes take, whatever number of them was timed before."""

    def plain_s(num_decodes: int) -> float:
        return 0.025 + (num_decodes - 1) * 0.001

    pacer = ChunkPacer(None)
    for _ in range(60):  # the second of two streams came while a prompt was computed
        pacer.observe(before, 0, plain_s(before))
        pacer.observe(before, 64, plain_s(before) + 64 * 0.001)
    took_s = plain_s(num) + pacer.tokens(num) * 0.001
    least = plain_s(num) if before == 1 else plain_s(1)  # those of many are halved at most
    assert 0.45 * TIMES * least < took_s <= 1.1 * TIMES * plain_s(num)


def test_one_slow_step_does_not_shorten_chunks_for_ever() -> None:
    pacer = ChunkPacer(3e-3)
    pacer.observe(4, 0, 0.5)  # it compiled something
    for _ in range(40):  # a long prompt comes: no step is without a part of it
        num_tokens = pacer.tokens(4)
        pacer.observe(4, num_tokens, BASE_S + num_tokens * EACH_S)
    assert BASE_S + pacer.tokens(4) * EACH_S == pytest.approx(3e-3, rel=0.1)


@given(
    st.floats(1e-4, 1.0),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4096), st.floats(0, 10)), max_size=20),
)
def test_a_prompt_always_goes_on(target_s: float, steps: list[tuple[int, int, float]]) -> None:
    pacer = ChunkPacer(target_s)
    assert pacer.tokens(1) == FIRST
    for step in steps:
        pacer.observe(*step)
        count = pacer.tokens(max(1, step[0]))
        assert count >= LEAST and count % LEAST == 0
