"""Steps that verify drafted tokens in the real runner: tokens and log-probabilities are those of
steps of one token, bit for bit, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixlm.cuda_graphs.dummy_run import DummyRun
from radixlm.devices.device import CpuDevice
from radixlm.executor.results import StepHandle
from radixlm.step.plan import Items, StepPlan
from radixlm.wire.requests import LogprobParams
from tests.executor.overlap_harness import OverlapHarness, workload
from tests.executor.test_overlap import _same
from tests.fakes.device import SimulatedDevice
from tests.fakes.drafts import ForcedDrafts, Oracle


def follower(plain: OverlapHarness) -> Oracle:
    """What the plain run has produced behind these ids."""

    def oracle(rid: str, ids: Sequence[int], count: int) -> list[int]:
        out = plain.out[rid]
        done = len(ids) - plain.prompt_len[rid]
        return out[done : done + count]

    return oracle


@pytest.mark.parametrize("kind", ["oracle", "adversary", "mixed", "random"])
@pytest.mark.parametrize(("seed", "num_pages"), [(0, 30), (1, 90), (3, 30)])
def test_tokens_are_those_of_the_plain_run(kind: str, seed: int, num_pages: int) -> None:
    plain = OverlapHarness(CpuDevice(), num_pages)
    aborted = workload(plain, seed)
    drafts = ForcedDrafts(follower(plain), kind, most=1 + 2 * seed, varies=seed % 2 == 1, seed=seed)
    wide = OverlapHarness(CpuDevice(), num_pages, drafts)
    aborted |= workload(wide, seed)
    _same(plain, wide, aborted)
    accepted = sum(accepted for rounds in drafts.rounds.values() for _, accepted in rounds)
    assert drafts.rounds
    assert kind == "random" or (accepted > 0) == (kind in ("oracle", "mixed"))


@pytest.mark.parametrize("kind", ["oracle", "mixed"])
def test_logprobs_are_those_of_the_plain_run(kind: str) -> None:
    def run(bench: OverlapHarness) -> OverlapHarness:
        for i in range(4):
            need = LogprobParams(prompt_from=-1, top=2, token_ids=[5, 9]) if i % 2 else None
            options = {"max_new_tokens": 21, "temperature": 0.7 * i, "sampling_seed": i}
            if i == 3:
                options |= {"presence_penalty": 0.6, "min_new_tokens": 9}
            bench.submit(f"r{i}", [i + 1] * (3 + i), i == 2, need, **options)
        bench.run()
        return bench

    plain = run(OverlapHarness())
    drafts = ForcedDrafts(follower(plain), kind, most=4)
    wide = run(OverlapHarness(drafts=drafts))
    assert wide.out == plain.out and wide.logprobs == plain.logprobs
    assert {rid: got.kind for rid, got in wide.finish.items()} == {
        rid: got.kind for rid, got in plain.finish.items()
    }
    assert any(plain.logprobs.values())
    if kind == "oracle":
        rounds = drafts.rounds["r0"]
        assert len(rounds) == -(-(len(plain.out["r0"]) - 1) // 5)


@pytest.mark.parametrize(("seed", "num_pages"), [(1, 90), (2, 30)])
def test_a_drafter_on_the_device(seed: int, num_pages: int) -> None:
    plain = OverlapHarness(CpuDevice(), num_pages)
    aborted = workload(plain, seed)
    drafts = ForcedDrafts(follower(plain), "device", most=1 + seed, varies=seed % 2 == 1)
    wide = OverlapHarness(CpuDevice(), num_pages, drafts)
    aborted |= workload(wide, seed)
    _same(plain, wide, aborted)
    assert sum(map(len, drafts.rounds.values()))


def test_a_drafter_that_is_the_model_is_always_right() -> None:
    drafts = ForcedDrafts(lambda *_: [], "device", most=3)
    bench = OverlapHarness(drafts=drafts)
    for i in range(5):
        bench.submit(f"r{i}", [i + 1] * (2 + 5 * i), False, max_new_tokens=22, temperature=0.0)
    bench.run()
    plain = OverlapHarness()
    for i in range(5):
        plain.submit(f"r{i}", [i + 1] * (2 + 5 * i), False, max_new_tokens=22, temperature=0.0)
    plain.run()
    assert bench.out == plain.out
    for rid, rounds in drafts.rounds.items():
        ended = [accepted == drafted for drafted, accepted in rounds]
        assert all(ended), rid
        assert len(rounds) <= -(-(len(plain.out[rid]) - 1) // 4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("seed", "graphs"), [(0, ()), (1, ()), (2, (1, 2, 4, 8)), (3, (3, 8))])
def test_a_late_device(seed: int, graphs: tuple[int, ...], depth: int) -> None:
    """One step ahead, the host knows neither the drafts of a step nor how many of the last step's
    were refused; graphs have rows of one width."""
    plain = OverlapHarness(CpuDevice(), 60)
    aborted = workload(plain, seed)
    drafts = ForcedDrafts(follower(plain), "device", most=2 + seed, varies=seed % 2 == 0)
    device = SimulatedDevice(seed, (0.0, 0.3, 0.8)[seed % 3])
    late = OverlapHarness(device, 60, drafts, depth=depth, graphs=graphs)
    aborted |= workload(late, seed)
    _same(plain, late, aborted)
    accepted = [got for rounds in drafts.rounds.values() for _, got in rounds]
    assert sum(accepted) and any(rounds for rounds in drafts.rounds.values())


def test_the_largest_step_with_drafts_can_be_tried_before_there_are_requests() -> None:
    bench = OverlapHarness(drafts=ForcedDrafts(lambda *_: [], most=3))
    seen: list[list[int]] = []
    forward = bench.runner.forward

    def watch(plan: StepPlan) -> StepHandle:
        drafts = Items.of(plan.items).drafts
        assert drafts is not None
        seen.append((drafts.lens + 1).tolist())
        return forward(plan)

    bench.runner.forward = watch  # type: ignore[method-assign]
    DummyRun(bench.runner, 8, 40).drafts(3, 17)
    DummyRun(bench.runner, 8, 40).drafts(1, 17)
    assert seen == [[4] * 4, [2] * 8]


@pytest.mark.parametrize("kind", ["adversary", "mixed", "random"])
@pytest.mark.parametrize(("seed", "num_pages"), [(0, 30), (1, 90), (3, 50)])
def test_trees_give_the_tokens_of_the_plain_run(kind: str, seed: int, num_pages: int) -> None:
    plain = OverlapHarness(CpuDevice(), num_pages)
    aborted = workload(plain, seed)
    most, varies = 1 + 2 * seed, seed % 2 == 1
    drafts = ForcedDrafts(follower(plain), kind, most, varies, seed=seed, paths=3)
    wide = OverlapHarness(CpuDevice(), num_pages, drafts, step_tokens=64)
    aborted |= workload(wide, seed)
    _same(plain, wide, aborted)
    assert drafts.num_gained


def test_logprobs_of_trees() -> None:
    def run(bench: OverlapHarness) -> OverlapHarness:
        for i in range(4):
            need = LogprobParams(prompt_from=-1, top=2, token_ids=[5, 9]) if i % 2 else None
            options = {"max_new_tokens": 21, "temperature": 0.7 * i, "sampling_seed": i}
            options |= {"presence_penalty": 0.6, "min_new_tokens": 9} if i == 3 else {}
            bench.submit(f"r{i}", [i + 1] * (3 + i), i == 2, need, **options)
        bench.run()
        return bench

    plain = run(OverlapHarness())
    drafts = ForcedDrafts(follower(plain), "mixed", most=4, paths=4)
    wide = run(OverlapHarness(drafts=drafts, step_tokens=128))
    assert wide.out == plain.out and wide.logprobs == plain.logprobs
    assert drafts.num_gained and any(plain.logprobs.values())


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_trees_of_a_drafter_on_the_device(seed: int, graphs: tuple[int, ...]) -> None:
    """On a device that is late: the drafter goes on in the pages of the path that was right."""
    plain = OverlapHarness(CpuDevice(), 60)
    aborted = workload(plain, seed)
    drafts = ForcedDrafts(follower(plain), "device", 2 + seed, seed % 2 == 1, paths=4)
    device = SimulatedDevice(seed, (0.0, 0.3, 0.8)[seed % 3]) if graphs else CpuDevice()
    wide = OverlapHarness(device, 60, drafts, graphs=graphs, step_tokens=64)
    aborted |= workload(wide, seed)
    _same(plain, wide, aborted)
    assert drafts.num_gained
