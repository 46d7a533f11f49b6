"""Order of requests, refusals, and control commands of operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from radixlm.admission_order.fair_share import FairShare
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.wire.replies import ControlReply, Finish
from radixlm.wire.requests import AbortRequest, Control, LogprobParams
from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness


class Recorder(Feature):
    """The order in which requests are first computed, and the released ones."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.released: list[str] = []

    def extend(self, items):  # type: ignore[no-untyped-def]
        self.started += [i.rid for i in items if i.rid not in self.started]
        return {}

    def release(self, request: Request) -> None:
        self.released.append(request.rid)


def _bench(**limits: object) -> tuple[SchedulerHarness, Recorder]:
    recorder = Recorder()
    return SchedulerHarness(features=(recorder,), **limits), recorder


def test_priorities_go_first_and_waiting_raises_them() -> None:
    bench, recorder = _bench(max_running=1, priorities=True, aging_s=10.0)
    bench.submit("first", [1, 2, 3], 4)
    bench.tick()
    bench.submit("low", [1, 2, 4], 2, priority=0, arrival_s=bench.now_s - 100)
    bench.submit("high", [1, 2, 5], 2, priority=5)
    bench.submit("higher", [1, 2, 6], 2, priority=9)
    bench.run()
    assert recorder.started == ["first", "low", "higher", "high"]
    assert sorted(recorder.released) == sorted(recorder.started)


@pytest.mark.parametrize("depth", [0, 1])
def test_much_higher_priorities_preempt(depth: int) -> None:
    bench, recorder = _bench(max_running=1, priorities=True, preemption_threshold=10, depth=depth)
    bench.submit("long", [1, 2, 3], 30, ignore_eos=True)
    for _ in range(5):
        bench.tick()
    bench.submit("near", [1, 2, 4], 3, priority=9)
    bench.submit("urgent", [1, 2, 5], 3, priority=50)
    bench.run()
    assert recorder.started == ["long", "urgent", "near"]
    assert list(bench.finish) == ["urgent", "near", "long"]
    assert bench.scheduler.planner.num_retracted == 1
    assert bench.out["long"] == reference([1, 2, 3], 30, True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_request_of_great_age_does_not_take_its_place_back(depth: int) -> None:
    bench, _ = _bench(max_running=1, priorities=True, preemption_threshold=10, depth=depth)
    bench.submit("old", [1, 2, 3], 30, ignore_eos=True)
    for _ in range(5):
        bench.tick()
    bench.now_s += 1000.0
    bench.submit("urgent", [1, 2, 4], 3, priority=20)
    bench.run()
    assert list(bench.finish) == ["urgent", "old"]
    assert bench.scheduler.planner.num_retracted == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("low_values_first", [False, True])
@pytest.mark.parametrize(("gap", "preempts"), [(9, False), (10, False), (11, True)])
def test_a_request_preempts_at_a_difference_above_the_threshold(
    gap: int, preempts: bool, low_values_first: bool, depth: int
) -> None:
    bench, _ = _bench(
        max_running=1,
        priorities=True,
        preemption_threshold=10,
        low_values_first=low_values_first,
        depth=depth,
    )
    bench.submit("long", [1, 2, 3], 30, ignore_eos=True)
    for _ in range(5):
        bench.tick()
    bench.submit("waits", [1, 2, 4], 3, priority=-gap if low_values_first else gap)
    bench.run()
    order = list(bench.finish)
    assert order == (["waits", "long"] if preempts else ["long", "waits"])
    assert bench.out["long"] == reference([1, 2, 3], 30, True)


def _waiting(keys: str) -> list[Request]:
    return [SimpleNamespace(wire=SimpleNamespace(fair_key=key)) for key in keys]  # type: ignore[misc]


def _order(share: FairShare, keys: str) -> str:
    return "".join(str(request.wire.fair_key) for request in share.sort(_waiting(keys)))


def _share(served: str, waiting: str) -> FairShare:
    """Users of whom some requests were served one after the other, and some wait."""
    share = FairShare(lambda request: request.wire.fair_key)
    _serve(share, served)
    for request in _waiting(waiting):
        share.arrive(request)
    return share


def _serve(share: FairShare, keys: str) -> None:
    for request in _waiting(keys):
        share.arrive(request)
        share.leave(request, is_served=True)


def test_a_user_who_comes_back_has_no_credit() -> None:
    share = _share("aaac", waiting="aa")
    (b,) = _waiting("b")
    share.arrive(b)
    assert _order(share, "aabb") == "abab", "b starts where a stands"
    _serve(share, "bbbbb")
    share.leave(b, is_served=False)
    share.arrive(b)
    assert _order(share, "baaaaaa") == "aaaaaba", "what b was served before counts still"


def test_a_user_who_comes_back_starts_with_the_least_served() -> None:
    share = _share("aaacccccc", waiting="acb")
    assert _order(share, "acb") == "abc"
    share.arrive(_waiting("a")[0])  # a waits already: nothing changes
    assert _order(share, "cba") == "bac"
    alone = _share("cccccc", waiting="d")  # nobody to compare with
    alone.arrive(_waiting("c")[0])
    assert _order(alone, "cd") == "dc"


def test_users_take_turns() -> None:
    bench, recorder = _bench(max_running=1, fair=True)
    for i in range(4):
        bench.submit(f"a{i}", [1, 2, 3, i + 1], 2, fair_key="a")
    bench.submit("b0", [1, 2, 3, 9], 2, fair_key="b")
    bench.run()
    assert recorder.started.index("b0") == 1


def test_requests_join_those_of_their_routing_key() -> None:
    """The key that most running requests have goes first, then the others by their keys."""
    bench, recorder = _bench(max_running=3, policy="routing-key")
    for i, (key, length) in enumerate((("a", 2), ("b", 40), ("b", 40))):
        bench.submit(f"run{i}", [1, 2, 3 + i], length, ignore_eos=True, routing_key=key)
    bench.tick()
    for i, key in enumerate(("d", "a", None, "b", "c", "b")):
        bench.submit(f"{key}{i}", [1, 3, 3 + i], 3, ignore_eos=True, routing_key=key)
    bench.run()
    assert recorder.started[3:] == ["b3", "b5", "None2", "a1", "c4", "d0"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("shortest-prefill-first", ["cached", "short", "middle", "long"]),
        ("hrrn", ["long", "cached", "short", "middle"]),
    ],
)
def test_prompts_go_by_what_the_cache_lacks(policy: str, order: list[str]) -> None:
    """Alone, or together with how long they have waited: long for 100 s, others for 3 s."""
    bench, recorder = _bench(max_running=1, policy=policy)
    known = list(range(2, 34))
    bench.submit("runs", known, 10, ignore_eos=True)
    bench.tick()
    bench.submit("long", [1] * 20, 1)
    bench.now_s += 97.0
    bench.submit("middle", [3] * 10, 1)
    bench.submit("short", [4] * 6, 1)
    bench.submit("cached", [*known, 7], 1)
    bench.now_s += 3.0
    bench.run()
    assert recorder.started == ["runs", *order]


def test_a_full_queue_refuses() -> None:
    bench, _ = _bench(max_running=1, max_queued=2)
    bench.submit("runs", [1, 2], 10, ignore_eos=True)
    bench.tick()
    for i in range(3):
        bench.submit(f"w{i}", [1, 2, i + 1], 1)
    bench.run()
    finish = bench.finish["w2"]
    assert (
        (finish.kind, finish.status) == ("error", 503)
        and finish.code == "queue_full"
        and (finish.retry_after_s or 0) >= 1
    )
    assert bench.finish["w0"].kind in ("length", "stop")


@pytest.mark.parametrize("is_paused", [False, True])
def test_requests_that_find_free_slots_do_not_fill_the_queue(is_paused: bool) -> None:
    bench, _ = _bench(max_running=3, max_queued=2)
    bench.scheduler.is_paused = is_paused
    for i in range(7):
        bench.submit(f"r{i}", [1, 2, i + 1], 50, ignore_eos=True)
    bench.tick()
    bench.submit("later", [1, 2], 1)
    bench.tick()
    refused = {name for name, finish in bench.finish.items() if finish.kind == "error"}
    first = 2 if is_paused else 5
    assert refused == {"later", *(f"r{i}" for i in range(first, 7))}
    bench.scheduler.is_paused = False
    bench.run()


def test_a_full_queue_keeps_the_higher_priorities() -> None:
    bench, _ = _bench(max_running=1, max_queued=2, priorities=True, preemption_threshold=100)
    bench.submit("runs", [1, 2], 10, ignore_eos=True)
    bench.tick()
    for name, priority in (("old", 1), ("low", 1), ("same", 1), ("high", 2), ("higher", 3)):
        bench.submit(name, [1, 2, 3], 1, priority=priority)
    bench.run()
    refused = {name: bench.finish[name].message for name in ("old", "low", "same")}
    outranked = "The request is aborted by a higher priority request."
    assert refused == {"old": outranked, "low": outranked, "same": "The request queue is full."}
    assert bench.finish["low"].status == 503
    assert {bench.finish[name].kind for name in ("runs", "high", "higher")} <= {"length", "stop"}


def test_deadlines() -> None:
    bench, _ = _bench(max_running=1)
    bench.submit("slow", [1, 2], 400, ignore_eos=True, deadline_s=bench.now_s + 0.05)
    bench.tick()
    bench.submit("late", [1, 3], 5, queue_deadline_s=bench.now_s + 0.02)
    bench.run()
    assert (bench.finish["slow"].kind, bench.finish["slow"].status) == ("abort", 408)
    assert (bench.finish["late"].kind, bench.finish["late"].status) == ("error", 503)
    assert 0 < len(bench.out["slow"]) < 400


def test_a_request_that_runs_too_long_ends_and_one_that_waited_long_runs() -> None:
    bench, _ = _bench(max_running=1, running_s=0.05)
    # the engine is idle: a request starts at once, whatever its limit in the queue
    bench.submit("slow", [1, 2], 400, ignore_eos=True, queue_deadline_s=bench.now_s - 1)
    bench.submit("short", [1, 3], 2, ignore_eos=True)
    bench.run()
    assert (bench.finish["slow"].kind, bench.finish["slow"].status) == ("error", 503)
    assert bench.finish["slow"].message == "Request running timeout reached."
    assert 0 < len(bench.out["slow"]) < 400 and bench.finish["short"].kind == "length"


def test_a_deadline_is_seen_beside_a_request_that_has_just_ended() -> None:
    bench, _ = _bench(max_running=2)
    end_s = bench.now_s + 1
    bench.submit("ends", [1, 2], 2, ignore_eos=True, deadline_s=end_s)
    bench.submit("late", [1, 3], 400, ignore_eos=True, deadline_s=end_s)
    bench.tick()
    ended, late = bench.deadlines._timed.values()
    while "ends" not in bench.finish:
        bench.tick()
    bench.deadlines._timed = {"ends": ended, "late": late}
    bench.deadlines.expire(end_s + 1)
    assert bench.finish["ends"].kind == "length"
    assert late.finish is not None and late.finish.status == 408


def test_prompt_larger_than_the_cache_is_refused() -> None:
    bench, _ = _bench(num_pages=8)
    bench.submit("big", [1] * 60, 5)
    bench.run()
    assert bench.finish["big"].status == 400
    assert "--max-total-tokens" in (bench.finish["big"].message or "")


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_waiting_and_running(depth: int) -> None:
    bench, recorder = _bench(max_running=1, depth=depth)
    bench.submit("runs", [1, 2], 100, ignore_eos=True)
    bench.submit("waits", [1, 3], 100)
    for _ in range(4):
        bench.tick()
    bench.mine.send(AbortRequest(rids=("runs", "waits", "unknown")))
    bench.run()
    assert bench.finish["runs"] == Finish("abort", message="aborted by request")
    assert bench.finish["waits"] == Finish("abort", message="Abort in waiting queue")
    assert sorted(recorder.released) == ["runs", "waits"]


@pytest.mark.parametrize("limits", [{}, {"depth": 1}, {"stages": 3, "depth": 2}])
def test_an_id_may_come_again_while_a_step_of_its_last_request_runs(limits: dict[str, int]) -> None:
    """A client that has left sends its request once more."""
    bench, _ = _bench(**limits)
    bench.submit("r", [1, 2, 3], 30, ignore_eos=True)
    for _ in range(4):
        bench.tick()
    bench.mine.send(AbortRequest(rids=("r",), quiet=True))
    bench.submit("r", [1, 2, 4], 3, ignore_eos=True)
    bench.run()
    assert bench.out["r"] == reference([1, 2, 4], 3, True)


def _control(bench: SchedulerHarness, verb: str, **args: object) -> ControlReply:
    bench.mine.send(Control(verb, verb, dict(args)))
    bench.tick()
    return next(r for r in bench.replies[::-1] if isinstance(r, ControlReply))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue_change_nothing(mode: str) -> None:
    bench, _ = _bench()
    bench.submit("r", [4, 5, 6], 20, ignore_eos=True)
    for _ in range(5):
        bench.tick()
    assert _control(bench, "pause", mode=mode).ok
    assert bench.scheduler.load(0.0).is_paused
    before = len(bench.out["r"])
    for _ in range(5):
        bench.tick()
    assert len(bench.out["r"]) == before
    assert _control(bench, "continue").ok
    assert not bench.scheduler.load(0.0).is_paused
    bench.run()
    assert bench.out["r"] == reference([4, 5, 6], 20, True)


def test_flush_does_not_wait() -> None:
    bench, _ = _bench()
    bench.submit("r", [4] * 20, 20, ignore_eos=True)
    bench.tick()
    refused = _control(bench, "flush_cache")
    assert not refused.ok and "1 requests run" in refused.message
    bench.run()
    assert bench.kv_manager.prefix_cache.total_pages > 0
    assert _control(bench, "flush_cache").ok
    assert bench.kv_manager.prefix_cache.total_pages == 0


def test_suspects_compute_their_prompts_alone() -> None:
    bench, _ = _bench()
    bench.submit("a", [1, 2, 3], 8, ignore_eos=True, is_quarantined=True)
    bench.submit("b", [1, 2, 4], 8, ignore_eos=True)
    bench.submit("c", [1, 2, 5], 8, ignore_eos=True, is_quarantined=True)
    bench.run()
    prompts = [p for p in bench.executor.steps if any(i.tokens is not None for i in p.items)]
    for plan in prompts:
        if any(i.rid in "ac" and i.tokens is not None for i in plan.items):
            assert len(plan.items) == 1
    assert bench.out["b"] == reference([1, 2, 4], 8, True)


def test_calls_of_a_user_take_turns() -> None:
    bench, recorder = _bench(max_running=1, fair=True)
    for i in range(4):
        bench.submit(f"a{i}", [1, 2, 3, i + 1], 2, fair_key="u", call_key="a")
    bench.submit("b0", [1, 2, 3, 9], 2, fair_key="u", call_key="b")
    bench.run()
    assert recorder.started.index("b0") == 1


@pytest.mark.parametrize("num_calls", [1, 2])
def test_large_calls_give_a_slot_to_another(num_calls: int) -> None:
    bench, recorder = _bench(max_running=8, fair=True)
    for i in range(24):
        key = f"large{i % num_calls}"
        bench.submit(f"a{i}", [1, 2, i + 1], 40, ignore_eos=True, call_key=key)
    for _ in range(12):
        bench.tick()
    assert len(bench.scheduler.planner.running) == 8
    bench.submit("plain", [1, 2, 40], 3, ignore_eos=True, call_key="plain")
    for _ in range(8):
        bench.tick()
    assert "plain" in bench.finish, "it waits for a sequence of the large call to end"
    assert not any(rid in bench.finish for rid in recorder.started[:8])
    bench.run()
    assert bench.out["plain"] == reference([1, 2, 40], 3, True)
    for i in range(24):
        assert bench.out[f"a{i}"] == reference([1, 2, i + 1], 40, True)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_large_call_gives_up_is_not_taken_back(depth: int) -> None:
    """Where one of its sequences has not enough pages for the other call, more follow."""
    bench, _ = _bench(fair=True, reserve=0.0, step_tokens=64, depth=depth, num_pages=41)
    for i in range(8):
        bench.submit(f"a{i}", [1, 2, 3 + i, 4, 5], 40, ignore_eos=True, call_key="large")
    for _ in range(14):
        bench.tick()
    bench.submit("b", [*range(1, 30), *range(1, 30), *range(1, 20)], 3, call_key="other")
    while "b" not in bench.finish:
        bench.tick()
    assert list(bench.finish) == ["b"]
    assert bench.scheduler.planner.num_retracted <= 8
    bench.run()


def test_calls_of_one_request_do_not_displace_each_other() -> None:
    bench, _ = _bench(max_running=2, fair=True)
    for i in range(6):
        bench.submit(f"a{i}", [1, 2, i + 1], 6, ignore_eos=True, call_key=f"c{i}")
    bench.run()
    assert bench.scheduler.planner.num_retracted == 0


def test_log_probabilities_of_prompts_are_computed_in_short_steps() -> None:
    class Longest(Feature):
        counts: ClassVar[list[int]] = []

        def extend(self, items):  # type: ignore[no-untyped-def]
            self.counts += [i.count for i in items if i.count > 1]
            return {}

    bench = SchedulerHarness(
        features=(Longest(),), num_pages=256, step_tokens=256, max_prefill_tokens=256
    )
    prompt = [1 + i % 50 for i in range(256)]
    bench.submit("plain", prompt[::-1], 2)
    bench.submit("top", prompt, 2, logprobs=LogprobParams(0, 100), arrival_s=101.0)
    bench.run()
    assert Longest.counts[0] == 256
    assert sum(Longest.counts[1:]) in range(250, 258) and max(Longest.counts[1:]) <= 8192 // 101
    assert bench.out["top"] == reference(prompt, 2)
