"""Drafted tokens in the scheduler: whatever a drafter proposes, the output, the prefix cache and
the pages are those of the run without it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from radixlm.base.record import replace
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.speculative.drafter import NOTHING
from radixlm.step.result import Proposals, StepResult
from radixlm.wire.requests import AbortRequest
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import FakeExecutor, FakeStep, next_token, reference
from tests.fakes.scheduler_harness import SchedulerHarness, serve_drawn


def oracle(rid: str, ids: list[int], count: int) -> list[int]:
    """What the model of the fake executor says."""
    known = list(ids)
    for _ in range(count):
        known.append(next_token(np.array(known)))
    return known[len(ids) :]


KINDS = ("oracle", "adversary", "mixed", "random", "broken")


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_output_is_that_of_the_plain_run(kind: str, page_size: int, varies: bool) -> None:
    drafts = ForcedDrafts(oracle, kind, most=5, varies=varies)
    harness = SchedulerHarness(num_pages=1024 // page_size, page_size=page_size, drafts=drafts)
    prompts = [[7 * i + j for j in range(1, 4 + i)] for i in range(6)]
    lengths = [1, 2, 5, 6, 30, 77]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        harness.submit(f"r{i}", prompt, length, ignore_eos=i % 2 == 0)
    harness.run()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert harness.out[f"r{i}"] == reference(prompt, length, ignore_eos=i % 2 == 0)
    assert not drafts.ids
    assert (drafts.rounds == {}) == (kind == "broken")


@pytest.mark.parametrize(("kind", "rounds"), [("oracle", 10), ("adversary", 40)])
def test_rounds(kind: str, rounds: int) -> None:
    """41 tokens: the prefill gives one, then an oracle's rounds give 4 each."""
    drafts = ForcedDrafts(oracle, kind)
    harness = SchedulerHarness(drafts=drafts, step_tokens=64)
    harness.submit("r", [1, 2, 3], 41, ignore_eos=True)
    harness.run()
    assert len(harness.executor.steps) == 1 + rounds
    assert drafts.steps[0][:2] == (1, 4)


def test_no_draft_gives_the_plain_plan() -> None:
    drafts = ForcedDrafts(oracle, most=0)
    harness = SchedulerHarness(drafts=drafts)
    harness.submit("r", [1, 2, 3], 8, ignore_eos=True)
    harness.run()
    plans = harness.executor.steps
    assert all(plan.items.drafts is None and plan.draft_lens is None for plan in plans)
    assert len({id(plan.items.decodes) for plan in plans[1:]}) == 1
    assert drafts.num_skipped == 1 and len(drafts.steps) == 7


def test_a_drafter_asked_in_vain_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many steps as the rule of lengths says."""
    drafts, asked = ForcedDrafts(oracle), list[str]()
    monkeypatch.setattr(drafts, "propose", lambda rid, most: asked.append(rid) or NOTHING)
    monkeypatch.setattr(drafts, "pause", lambda host_s, num_tokens: 3)
    harness = SchedulerHarness(drafts=drafts)
    harness.submit("r", [1, 2, 3], 13, ignore_eos=True)
    harness.run()
    assert harness.out["r"] == reference([1, 2, 3], 13, ignore_eos=True)
    assert len(asked) == 3  # of 12 steps


@pytest.mark.parametrize("window", [0, 6])
def test_drafts_never_retract(window: int) -> None:
    """With room for the tokens alone, drafts shrink; no request is retracted for them, and what is
    retracted for want of pages comes back with the same output."""
    outputs = []
    for drafts in (None, ForcedDrafts(oracle, "mixed", most=8, varies=True)):
        options = {"window": window, "num_window": 40} if window else {}
        harness = SchedulerHarness(num_pages=20, reserve=0.0, drafts=drafts, **options)
        for i in range(5):
            harness.submit(f"r{i}", [i + 1] * (3 + i), 20, ignore_eos=True)
        harness.run()
        outputs.append((harness.out, harness.scheduler.planner.num_retracted))
    assert outputs[0][0] == outputs[1][0]
    fits = SchedulerHarness(num_pages=6, drafts=ForcedDrafts(oracle, "oracle", most=8), reserve=0.0)
    for i in range(2):
        fits.submit(f"r{i}", [i + 1] * 3, 10, ignore_eos=True)
    fits.run()
    assert fits.scheduler.planner.num_retracted == 0


@pytest.mark.parametrize("kind", ["oracle", "mixed", "adversary"])
def test_cache_holds_no_guess(kind: str) -> None:
    """A second request whose prompt goes on in the first one's output hits what the plain run
    leaves, and no more."""
    hits = []
    for drafts in (None, ForcedDrafts(oracle, kind, most=7)):
        harness = SchedulerHarness(drafts=drafts, min_tail=None)
        harness.submit("a", [3, 1, 4, 1, 5], 30, ignore_eos=True)
        harness.run()
        follow = [3, 1, 4, 1, 5, *harness.out["a"], 9, 9]
        harness.submit("b", follow, 4, ignore_eos=True)
        harness.run()
        assert harness.out["b"] == reference(follow, 4, ignore_eos=True)
        hits.append(harness.cached["b"])
    assert hits[0] == hits[1] > 0


@pytest.mark.parametrize("length", range(30, 36))
def test_the_end_of_the_context(length: int) -> None:
    """A run of drafts ends at the last place of the context."""
    drafts = ForcedDrafts(oracle, most=8)
    harness = SchedulerHarness(drafts=drafts, context_len=40)
    prompt = [(3 * i) % 29 + 1 for i in range(length)]
    harness.submit("r", prompt, 50, ignore_eos=True)
    harness.run()
    assert harness.out["r"] == reference(prompt, 40 - length, ignore_eos=True)
    assert harness.finish["r"].kind == "length"
    ends = [item.start + item.count for plan in harness.executor.steps for item in plan.items]
    assert max(ends) == 39  # nothing is sampled behind the last token


def run_in_a_tight_pool(drafts: ForcedDrafts | None, **options: Any) -> None:
    """The pool has pages for the tokens of both requests alone: neither is retracted."""
    harness = SchedulerHarness(25, drafts=drafts, page_size=1, reserve=0.0, **options)
    harness.submit("long", [1, 2, 3], 20, ignore_eos=True)
    harness.submit("short", [4, 5, 6], 10, ignore_eos=True)
    harness.run()
    assert harness.out["long"] == reference([1, 2, 3], 20, ignore_eos=True)
    assert harness.scheduler.planner.num_retracted == 0


@pytest.mark.parametrize("drafter", [None, "adversary", "mixed"])
@pytest.mark.parametrize("radix", [True, False])
def test_pages_ahead_are_given_back_before_a_request_is_retracted(
    drafter: str | None, radix: bool
) -> None:
    """The pages fit the tokens of both requests, but not those of refused drafts too."""
    drafts = ForcedDrafts(oracle, drafter, most=8) if drafter else None
    run_in_a_tight_pool(drafts, radix=radix)


def test_drafts_take_what_chunks_leave() -> None:
    drafts = ForcedDrafts(oracle, most=8)
    harness = SchedulerHarness(drafts=drafts, step_tokens=16)
    harness.submit("a", [1, 2, 3], 60, ignore_eos=True)
    for _ in range(3):
        harness.tick()
    harness.submit("b", list(range(1, 30)), 4, ignore_eos=True)
    harness.run()
    for plan in harness.executor.steps:
        assert plan.num_tokens <= 16
    assert harness.out["a"] == reference([1, 2, 3], 60, ignore_eos=True)


def test_random_life() -> None:
    """Requests come, stop, are aborted and retracted while drafts of every kind are verified."""
    rng = random.Random(5)
    for seed in range(6):
        kind = ("mixed", "random", "oracle")[seed % 3]
        drafts = ForcedDrafts(oracle, kind, most=rng.choice([1, 3, 8]), varies=True, seed=seed)
        harness = SchedulerHarness(
            num_pages=40, drafts=drafts, reserve=0.1, page_size=4, step_tokens=24
        )
        wanted = {}
        for i in range(24):
            prompt = [rng.randint(1, 5) for _ in range(rng.randint(1, 20))]
            max_new, ignore = rng.randint(1, 40), rng.random() < 0.5
            harness.submit(f"r{i}", prompt, max_new, ignore_eos=ignore, stream=rng.random() < 0.5)
            wanted[f"r{i}"] = reference(prompt, max_new, ignore)
            for _ in range(rng.randint(0, 3)):
                harness.tick()
            if rng.random() < 0.2:
                gone = f"r{rng.randint(0, i)}"
                harness.mine.send(AbortRequest(rids=(gone,)))
        harness.run()
        for rid, tokens in wanted.items():
            if harness.finish[rid].kind == "abort":
                assert harness.out[rid] == tokens[: len(harness.out[rid])]
            else:
                assert harness.out[rid] == tokens


@pytest.mark.parametrize("num_states", [9, 24, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_states_go_back(page_size: int, num_states: int) -> None:
    """Recurrent models: each step starts from the state of the known tokens, in steps behind
    refused drafts, in prefix hits and after retractions too."""
    rng = random.Random(page_size)
    for seed, kind in enumerate(("mixed", "adversary", "oracle", "random")):
        drafts = ForcedDrafts(oracle, kind, most=(2, 7)[seed % 2], varies=True, seed=seed)
        harness = SchedulerHarness(
            num_pages=160 // page_size, num_window=num_states, drafts=drafts, states=True,
            reserve=0.1, page_size=page_size, max_running=num_states // 4,
        )  # fmt: skip
        wanted: dict[str, list[int]] = {}
        last: list[int] = []
        for i in range(16):
            prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 20))]
            if wanted and rng.random() < 0.4:  # goes on behind an earlier answer
                prompt = last + harness.out[f"r{i - 1}"] + prompt[:3]
            last = prompt
            max_new, ignore = rng.randint(1, 40), rng.random() < 0.7
            harness.submit(f"r{i}", prompt, max_new, ignore_eos=ignore, stream=rng.random() < 0.5)
            wanted[f"r{i}"] = reference(prompt, max_new, ignore)
            for _ in range(rng.choice([0, 1, 3, 60])):
                harness.tick()
            if rng.random() < 0.1:
                harness.mine.send(AbortRequest(rids=(f"r{rng.randint(0, i)}",)))
        harness.run()
        for rid, tokens in wanted.items():
            if harness.finish[rid].kind == "abort":
                tokens = tokens[: len(harness.out[rid])]
            assert harness.out[rid] == tokens
        rounds = [one for rounds in drafts.rounds.values() for one in rounds]
        assert sum(drafted for drafted, _ in rounds) > 50


def test_a_refusal_costs_no_step() -> None:
    """The step behind a refused draft computes the known tokens again and gives the next one."""
    harness = SchedulerHarness(
        drafts=ForcedDrafts(oracle, "adversary"), num_window=16, states=True, step_tokens=64
    )
    harness.submit("r", [1, 2, 3], 41, ignore_eos=True)
    harness.run()
    assert len(harness.executor.steps) == 41
    assert harness.out["r"] == reference([1, 2, 3], 41, ignore_eos=True)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_an_end_inside_a_run_leaves_no_wrong_state(page_size: int) -> None:
    """Drafts behind the end token are accepted too, and the state has gone over them."""
    drafts = ForcedDrafts(oracle, most=9, varies=True)
    harness = SchedulerHarness(
        num_pages=2048, num_window=512, drafts=drafts, states=True, page_size=page_size
    )
    rng, num_cached = random.Random(2), 0
    for i in range(60):
        prompt = [rng.randint(1, 30) for _ in range(rng.randint(4, 12))]
        harness.submit(f"a{i}", prompt, 40)
        harness.run()
        follow = [*prompt, *harness.out[f"a{i}"], 7, 7]
        harness.submit(f"b{i}", follow, 3, ignore_eos=True)
        harness.run()
        assert harness.out[f"b{i}"] == reference(follow, 3, ignore_eos=True)
        num_cached += harness.cached[f"b{i}"] > len(prompt)
    assert num_cached > 30


class _Forces(Feature):
    """Forces 41 tokens once a request has three."""

    def arrive(self, request: Request) -> bool:
        return True

    def forced(self, request: Request) -> list[int]:
        return [9] * 41 if request.num_output == 3 else []


@pytest.mark.parametrize("page_size", [1, 4])
def test_forced_tokens_in_several_chunks_have_their_states(page_size: int) -> None:
    """Pages up to the last forced token are given at once, but a step computes 16 of them."""
    harness = SchedulerHarness(
        num_pages=256, num_window=32, states=True, page_size=page_size, features=(_Forces(),)
    )
    harness.submit("r", [1, 2, 3], 60, ignore_eos=True)
    harness.run()
    prompt = [1, 2, 3, *reference([1, 2, 3], 3, ignore_eos=True), *[9] * 41]
    assert harness.out["r"] == [*prompt[3:], *reference(prompt, 16, ignore_eos=True)]


def propose_late(harness: SchedulerHarness, step: FakeStep) -> StepResult:
    """What a device's drafter that is mostly right adds to the results of a step."""
    executor, result, found = harness.executor, FakeExecutor.read(harness.executor, step), []
    emitting = [(i, got) for i, got in zip(step.plan.items, step.results, strict=True) if i.emit]
    lens = step.plan.draft_lens
    assert lens is not None
    for (item, got), count in zip(emitting, lens.tolist(), strict=True):
        length = item.start + (item.count if item.tokens is not None else len(got.tokens))
        known = [*executor.prefix(item.slot, length).tolist(), got.tokens[-1]]
        found += [token ^ (token % 7 == 3) for token in oracle("", known, count)]
    survival = np.full(len(found), 0.5, np.float32)
    return replace(result, proposals=Proposals(lens, np.array(found, np.int32), survival))


@pytest.mark.parametrize(("page_size", "num_states"), [(1, 40), (2, 40), (4, 40), (1, 12)])
def test_pages_ahead_for_a_drafter_have_states_where_they_are_due(
    page_size: int, num_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's drafter has pages for more tokens than the next step computes."""
    drafts = ForcedDrafts(oracle, "device", most=9, varies=True)
    harness = SchedulerHarness(
        num_pages=400 // page_size, num_window=1 + num_states, drafts=drafts, states=True,
        page_size=page_size, max_running=min(8, num_states // 4),
    )  # fmt: skip
    monkeypatch.setattr(harness.executor, "read", partial(propose_late, harness))
    serve_drawn(harness, random.Random(0))
    rounds = [one for rounds in drafts.rounds.values() for one in rounds]
    assert sum(accepted for _, accepted in rounds) > 10
    assert any(accepted < drafted for drafted, accepted in rounds)
