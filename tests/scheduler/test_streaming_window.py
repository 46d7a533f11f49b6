"""Requests with a streaming window: what they see depends on the stream's tokens alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.limits import RopeLengths
from radixlm.scheduler.request import Request
from radixlm.wire.requests import AdapterRef, StreamingWindow, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.executor import next_token
from tests.fakes.scheduler_harness import SchedulerHarness


def visible(stream: list[int], window: StreamingWindow) -> list[int]:
    """What the next token is computed from, a token at a time: when sinks and window are full, the
    older half of the window goes."""
    seen: list[int] = []
    for token in stream:
        seen.append(token)
        if len(seen) == window.size:
            del seen[window.sinks : window.sinks + window.tokens // 2]
    return seen


def streamed(prompt: list[int], count: int, window: StreamingWindow) -> list[int]:
    """Greedy tokens of one stream alone."""
    stream = list(prompt)
    for _ in range(count):
        stream.append(next_token(np.array(visible(stream, window))))
    return stream[len(prompt) :]


@given(st.integers(2, 40).map(lambda half: 2 * half), st.integers(1, 9), st.integers(1, 400))
def test_what_is_dropped_follows_from_the_length(tokens: int, sinks: int, length: int) -> None:
    window, stream = StreamingWindow(tokens, sinks), list(range(length))
    count = window.num_dropped(length)
    assert visible(stream, window) == stream[:sinks] + stream[sinks + count :]
    assert length - count < window.size, "the next token fits"
    assert not count or length - count >= sinks + tokens // 2


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("window", [0, 9])
def test_an_endless_stream_needs_the_pages_of_its_window(depth: int, window: int) -> None:
    """Six streams of ten windows each in pages for four of them; two are resumed, one has a prompt
    of many windows."""
    streaming = StreamingWindow(24, 3)
    bench = SchedulerHarness(28, depth=depth, window=window, num_window=60, context_len=27)
    want = {}
    for i in range(6):
        prompt = [1 + (i * 7 + j) % 29 for j in range(200 if i == 4 else 3 + i)]
        want[f"r{i}"] = streamed(prompt, 240, streaming)
        done = want[f"r{i}"][:100] if i % 2 else []
        bench.submit(
            f"r{i}",
            [*prompt, *done],
            240,
            ignore_eos=True,
            num_emitted=len(done),
            streaming=streaming,
            stream=i != 2,
        )
        want[f"r{i}"] = want[f"r{i}"][len(done) :]
    bench.run()
    assert bench.out == want
    assert {end.kind for end in bench.finish.values()} == {"length"}


def test_a_request_without_a_window_finds_no_other_numbers() -> None:
    """Pages are in the cache by the tokens that they were computed from."""
    streaming, prompt = StreamingWindow(16, 4), [1 + i % 29 for i in range(60)]
    bench = SchedulerHarness()
    bench.submit("window", prompt, 30, ignore_eos=True, streaming=streaming)
    bench.run()
    whole = [*prompt, *bench.out["window"]]
    bench.submit("whole", whole, 4, ignore_eos=True)
    bench.submit("again", whole, 4, ignore_eos=True, streaming=streaming)
    bench.submit("seen", visible(whole, streaming), 2, ignore_eos=True)
    bench.run()
    assert bench.cached["whole"] <= streaming.sinks
    assert bench.out["whole"] == streamed(whole, 4, StreamingWindow(400))
    assert bench.out["again"] == streamed(whole, 4, streaming)
    assert bench.out["seen"] == bench.out["again"][:2]
    assert bench.cached["seen"] > streaming.sinks


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 9))
def test_nothing_of_the_output_is_forgotten(num_prompt: int, num_output: int, sinks: int) -> None:
    ids = list(range(num_prompt + num_output + 1))
    wire = TokenizedRequest(
        "r", pack_ids(ids), SamplingParams(max_new_tokens=99), num_emitted=num_output + 1,
        streaming=StreamingWindow(8, sinks),
    )  # fmt: skip
    request = Request(wire, frozenset(), CacheNamespace())
    request.slide()
    assert request.whole_output.tolist() == ids[num_prompt:]
    assert request.prompt_len + len(request.output_ids) == request.num_tokens


def _admissions(bench: SchedulerHarness) -> list[Any]:
    return [admission for plan in bench.executor.steps for admission in plan.admissions]


def test_what_counts_tokens_goes_on_counting() -> None:
    """Draws differ though positions come again; the least number of tokens is of the stream."""
    bench, prompt = SchedulerHarness(), [5, 6, 7, 8, 9, 10]
    bench.submit("r", prompt, 60, ignore_eos=True, streaming=StreamingWindow(16, 2))
    bench.run()
    found = _admissions(bench)
    assert len(found) > 4
    assert len({one.sampling.sampling_seed for one in found}) == len(found)
    assert [len(one.prompt_ids) for one in found[:3]] == [6, 2, 2]
    assert [len(one.prompt_ids) + len(one.output_ids) for one in found[1:3]] == [10, 10]


def test_the_place_of_an_adapter_and_the_kind_of_kv_move_along() -> None:
    """A window of 10 tokens has the short kind of KV, whatever the prompt's length."""
    bench = SchedulerHarness(rope=RopeLengths(12, False))
    prompt, window = [1 + i % 29 for i in range(30)], StreamingWindow(8, 2)
    for rid, start in (("late", 29), ("lost", 9), ("sink", 1)):
        adapter = AdapterRef("a", 1, "a" * 32, start)
        bench.submit(rid, prompt, 3, ignore_eos=True, streaming=window, adapter=adapter)
    variants = set()
    while len(bench.finish) < 3:
        bench.tick()
        variants |= {r.namespace.rope_variant for r in bench.scheduler.planner.running}
    assert variants == {None}
    starts = {one.rid: one.adapter_start for one in reversed(_admissions(bench))}
    # 24 of 30 tokens are dropped behind the sinks
    assert starts == {"late": 5, "lost": 2, "sink": 1}
