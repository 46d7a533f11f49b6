"""A request gets the tokens that it would get alone, whatever else is in the batch."""

from __future__ import annotations

import random
from concurrent.futures import Future
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from radixlm.admission_order.forced_retraction import ForcedRetraction
from radixlm.operations.commands import MAX_SLEEP_S
from radixlm.scheduler import loop as loop_module
from radixlm.scheduler.limits import RopeLengths
from radixlm.step.result import StepResult
from radixlm.wire.media import Media
from radixlm.wire.replies import ControlReply, Logprobs, StepReply
from radixlm.wire.requests import AdapterRef, Control, LogprobParams
from tests.fakes.executor import EOS, FakeStep, reference
from tests.fakes.scheduler_harness import SchedulerHarness, draw_prompts, serve_drawn
from tests.fakes.step_results import item_results, step_result

POLICIES = [
    *("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"),
    *("shortest-prefill-first", "hrrn"),
]
# every value of every option, and every pair of depth, cache, pool size and window
CASES = [
    (depth, radix, (depth + pages + window) % 2 == 0, pages, POLICIES[i % len(POLICIES)], window)
    for i, (depth, radix, pages, window) in enumerate(
        product((0, 1, 2), (True, False), (30, 400), (0, 9))
    )
]


@pytest.mark.parametrize(("depth", "radix", "mixed", "num_pages", "policy", "window"), CASES)
def test_equals_one_at_a_time(
    depth: int, radix: bool, mixed: bool, num_pages: int, policy: str, window: int
) -> None:
    rng = random.Random(depth * 7 + num_pages)
    bench = SchedulerHarness(
        num_pages,
        radix=radix,
        mixed=mixed,
        depth=depth,
        policy=policy,
        window=window,
        num_window=60,
    )
    serve_drawn(bench, rng)


def test_retractions_do_not_change_tokens() -> None:
    bench = SchedulerHarness(num_pages=24, reserve=0.0)
    prompts = draw_prompts(random.Random(3), 6, shared=0)
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt[:8], 40, ignore_eos=True)
    bench.run()
    assert bench.scheduler.planner.num_retracted > 0
    for i, prompt in enumerate(prompts):
        assert bench.out[f"r{i}"] == reference(prompt[:8], 40, True)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forced_retractions_change_no_tokens(depth: int) -> None:
    bench = SchedulerHarness(depth=depth)
    planner = bench.scheduler.planner
    planner.preemption = ForcedRetraction(planner, bench.scheduler.queue, 3)  # type: ignore[arg-type]
    serve_drawn(bench, random.Random(5))
    assert planner.num_retracted > 8
    alone = planner.num_retracted
    bench.submit("alone", [1, 2, 3], 20, ignore_eos=True)
    bench.run()
    assert planner.num_retracted == alone


def test_others_wait_while_more_run_than_forced_retractions_leave() -> None:
    bench = SchedulerHarness()
    planner = bench.scheduler.planner
    planner.preemption = ForcedRetraction(planner, bench.scheduler.queue, 99, 2)  # type: ignore[arg-type]
    for i in range(8):
        bench.submit(f"r{i}", [1 + i, 2, 3], 20, ignore_eos=True)
        bench.tick()
    assert len(planner.running) == 3 and len(bench.scheduler.queue) == 5
    bench.run()
    for i in range(8):
        assert bench.out[f"r{i}"] == reference([1 + i, 2, 3], 20, True)


def test_output_tokens_found_after_a_retraction_are_no_cached_prompt_tokens() -> None:
    bench = SchedulerHarness()
    bench.submit("r", [1, 2, 3], 40, ignore_eos=True)
    for _ in range(30):
        bench.tick()
    (request,) = bench.scheduler.planner.running
    bench.scheduler.planner.retract(request)
    bench.run()
    assert request.num_cached > 3 and bench.cached["r"] == 3


def test_a_prefix_is_computed_once_for_simultaneous_requests() -> None:
    shared = [1 + i % 30 for i in range(40)]
    bench = SchedulerHarness(num_pages=400)
    for i in range(6):
        bench.submit(f"r{i}", [*shared, i + 1], 4)
    bench.run()
    computed = sum(plan.num_tokens for plan in bench.executor.steps)
    assert [bench.cached[f"r{i}"] for i in range(6)] == [0, 40, 40, 40, 40, 40]
    assert computed < 41 + 6 * 8


def test_finish_reasons() -> None:
    bench = SchedulerHarness()
    prompt = next(p for p in ([i, i] for i in range(1, 31)) if EOS in reference(p, 30))
    bench.submit("eos", prompt, 30)
    bench.submit("length", [5, 6], 3, ignore_eos=True)
    bench.submit("nothing", [5, 6, 7], 0)
    bench.run()
    assert (bench.finish["eos"].kind, bench.finish["eos"].matched) == ("stop", EOS)
    assert bench.finish["length"].kind == "length"
    assert bench.out["nothing"] == [] and bench.finish["nothing"].kind == "length"


def test_a_resumed_request_continues_where_it_was() -> None:
    want = reference([7, 8, 9], 20, True)
    bench = SchedulerHarness()
    bench.submit("r", [7, 8, 9, *want[:6]], 20, ignore_eos=True, num_emitted=6)
    bench.run()
    assert bench.out["r"] == want[6:]


def test_extra_keys_do_not_share() -> None:
    bench = SchedulerHarness()
    prompt = [3] * 20
    bench.submit("a", prompt, 2, extra_key="x")
    bench.run()
    bench.submit("b", prompt, 2, extra_key="y")
    bench.submit("c", prompt, 2, extra_key="x")
    bench.run()
    assert bench.cached["b"] == 0 and bench.cached["c"] == 19


def _media(digest: bytes) -> Media:
    return Media("image", digest, ((18, 1),), {}, affects_earlier_tokens=True)


# as parts of one text, joined by NUL, each of these would be the second to fifth of another
NAMESPACES: list[dict[str, Any]] = [
    {},
    {"extra_key": "A"},
    {"cache_salt": "A"},
    {"tenant": "A"},
    {"adapter": AdapterRef("a", 1, "A")},
    {"extra_key": "A\0B"},
    {"extra_key": "A", "cache_salt": "B"},
    {"cache_salt": "\0B", "extra_key": "A"},
    {"extra_key": "A\0" + "42" * 32},
    {"extra_key": "A", "media": (_media(b"B" * 32),)},
    {"extra_key": "A", "media": (_media(b"B" * 32), _media(b"C" * 32))},
    {"extra_key": "A\0" + "42" * 32, "media": (_media(b"C" * 32),)},
]


def test_no_value_of_one_field_passes_for_those_of_two() -> None:
    bench = SchedulerHarness(num_pages=400)
    prompt = [3] * 20
    for turn in range(2):
        for i, fields in enumerate(NAMESPACES):
            bench.submit(f"{turn}{i}", prompt, 2, **fields)
            bench.run()
    rids = range(len(NAMESPACES))
    assert [bench.cached[f"0{i}"] for i in rids] == [0] * len(NAMESPACES)
    assert [bench.cached[f"1{i}"] for i in rids] == [19] * len(NAMESPACES)


@pytest.mark.parametrize("sleep_s", [-1, 1e300, float("inf"), float("nan"), "x"])
def test_a_sleep_that_cannot_be_is_refused(sleep_s: Any) -> None:
    bench = SchedulerHarness()
    bench.mine.send(Control("c", "slow_down", {"forward_sleep_time": sleep_s}))
    bench.tick()
    (reply,) = [reply for reply in bench.replies if isinstance(reply, ControlReply)]
    assert not reply.ok
    bench.submit("r", [1, 2], 2)
    bench.run()
    assert "r" in bench.finish


def test_a_command_with_a_fault_does_not_end_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, work = SchedulerHarness(), Future[Any]()
    work.set_result(lambda: {}["absent"])
    answers: dict[str, Any] = {"later": lambda: work, "now": lambda: {}["absent"]}
    monkeypatch.setattr(bench.executor, "control", lambda verb, args: answers[verb]())
    for verb in answers:
        bench.mine.send(Control(verb, verb, {}))
    bench.tick()
    replies = [reply for reply in bench.replies if isinstance(reply, ControlReply)]
    assert {reply.call_id: reply.ok for reply in replies} == {"now": False, "later": False}
    assert all("KeyError" in reply.message for reply in replies)
    bench.submit("r", [1, 2], 2)
    bench.run()
    assert "r" in bench.finish


@pytest.mark.parametrize("verb", ["pause", "release_memory", "publish_weights"])
def test_a_step_that_fails_under_a_command_is_not_lost(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens would be missing from the answers: the scheduler must be replaced."""
    bench = SchedulerHarness(depth=1)
    bench.submit("r", [1, 2, 3], 20)
    for _ in range(4):
        bench.tick()
    assert bench.scheduler.inflight

    def read(step: FakeStep) -> StepResult:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.executor, "read", read)
    bench.mine.send(Control("c", verb, {"mode": "retract", "tags": ["kv_cache"]}))
    with pytest.raises(RuntimeError, match="broken"):
        bench.tick()


def test_a_sleep_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, slept = SchedulerHarness(), list[float]()
    monkeypatch.setattr(loop_module.time, "sleep", slept.append)
    for sleep_s in (0.5, MAX_SLEEP_S, 0):
        bench.mine.send(Control("c", "slow_down", {"forward_sleep_time": sleep_s}))
        bench.tick()
        answers = [reply for reply in bench.replies if isinstance(reply, ControlReply)]
        assert answers[-1].ok and bench.scheduler.sleep_s == sleep_s
        slept.clear()
        bench.submit(f"r{sleep_s}", [1, 2], 2)
        bench.run()
        assert set(slept) == ({sleep_s} if sleep_s else set())


@pytest.mark.parametrize(("most", "kept"), [(4096, 10), (6, 3)])
def test_room_is_kept_for_prompts_and_a_share_of_outputs(most: int, kept: int) -> None:
    """Four tokens of a prompt of 12 have pages; 20 tokens of output may follow."""
    bench = SchedulerHarness(step_tokens=4, reserve=0.5, max_reserved=most)
    bench.submit("a", [1] * 12, 20, ignore_eos=True)
    bench.tick()
    planner, table = bench.scheduler.planner, bench.scheduler.planner._table
    slots = planner._running_slots()
    left = int((table.prefill_len - table.num_allocated)[slots].sum())
    assert left > 0 and planner._spare_pages() == bench.kv_manager.pages_for(left + kept)


@pytest.mark.parametrize("prompt", [2, 40])
def test_a_window_of_pages_must_be_free(prompt: int) -> None:
    """The pages of the prompt and its next token, or of a window, and two more."""
    bench = SchedulerHarness(window=8, num_window=9, page_size=4, radix=False)
    assert bench.kv_manager.window is not None
    window, manager = bench.kv_manager.window, bench.kv_manager
    need = -(-min(prompt + 1, window.table.window_tokens) // 4) + 2
    bench.submit("r", [1] * prompt, 4)
    bench.scheduler._receive(0)
    (request,) = bench.scheduler.queue
    window.pages.alloc(window.pages.num_free - need)
    no_match = manager.prefix_cache.match(request.ids, request.namespace)
    assert manager._window_fits(request, no_match)
    window.pages.alloc(1)
    assert not manager._window_fits(request, no_match)


def test_a_rope_variant_is_no_extra_key() -> None:
    bench = SchedulerHarness(rope=RopeLengths(8, is_dynamic=True))
    bench.submit("short", [3] * 8, 2, extra_key="A\0rope20")
    bench.run()
    bench.submit("long", [3] * 20, 2, extra_key="A")
    bench.run()
    assert bench.cached["long"] == 0


def test_context_end_is_a_length_finish() -> None:
    bench = SchedulerHarness(context_len=16)
    bench.submit("r", [2] * 10, 100, ignore_eos=True)
    bench.run()
    assert len(bench.out["r"]) == 6 and bench.finish["r"].kind == "length"


def test_prompt_outputs_are_sent_once_after_a_retraction() -> None:
    bench = SchedulerHarness()
    need = LogprobParams(prompt_from=0)
    bench.submit("r", [1 + i % 30 for i in range(40)], 4, ignore_eos=True, logprobs=need)
    read = bench.executor.read

    def with_logprobs(step):  # type: ignore[no-untyped-def]
        result = read(step)
        for item, got in zip(step.plan.items, item_results(result), strict=True):
            if item.targets is not None:
                got.prompt_logprobs = Logprobs([(0.0, int(t)) for t in item.targets], [], [])
        return result

    bench.executor.read = with_logprobs  # type: ignore[method-assign]
    bench.tick()
    bench.tick()
    bench.scheduler.planner.retract(bench.scheduler.planner.running[0])
    bench.run()
    told = [
        delta.prompt_logprobs.chosen
        for reply in bench.replies
        if isinstance(reply, StepReply)
        for delta in reply.deltas
        if delta.prompt_logprobs
    ]
    assert sum(len(part) for part in told) == 39


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_hidden_states_are_sent_once_through_retractions(depth: int) -> None:
    bench = SchedulerHarness(num_pages=24, reserve=0.0, depth=depth)
    for i in range(6):
        bench.submit(f"r{i}", [1 + i] * 9, 30, ignore_eos=True, return_hidden_states=True)
    read = bench.executor.read

    def with_states(step: FakeStep) -> StepResult:
        read(step)
        for item, got in zip(step.plan.items, step.results, strict=True):
            places = np.arange(item.start, item.start + item.count, dtype=np.float32)
            got.hidden_states = places.tobytes()
        return step_result(step.plan.items, step.results)

    bench.executor.read = with_states  # type: ignore[method-assign]
    bench.run()
    assert bench.scheduler.planner.num_retracted > 0
    told: dict[str, bytes] = {}
    for reply in bench.replies:
        for delta in reply.deltas if isinstance(reply, StepReply) else ():
            told[delta.rid] = told.get(delta.rid, b"") + b"".join(delta.hidden_states or ())
    for states in told.values():
        assert np.frombuffer(states, np.float32).tolist() == list(range(9 + 30 - 1))


def test_the_load_line_tells_the_rate_since_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "radixlm.operations.step_log")
    bench = SchedulerHarness(log_interval=5)
    for start_s in (500.0, 900.0):  # each after a rest
        bench.now_s = start_s
        bench.tick()
        bench.submit(f"r{start_s}", [1, 2, 3], max_new=12, ignore_eos=True)
        while f"r{start_s}" not in bench.finish:
            bench.tick()
            bench.now_s += 0.01
    rates = [int(line.split(" tokens/s")[0].split()[-1]) for line in caplog.text.splitlines()]
    assert len(rates) >= 4
    assert all(70 <= rate <= 130 for rate in rates), rates


def test_short_answers_with_rests_tell_a_true_rate(caplog: pytest.LogCaptureFixture) -> None:
    """The line may come at the first step after a rest: it tells what came before it too."""
    caplog.set_level("INFO", "radixlm.operations.step_log")
    bench = SchedulerHarness(log_interval=5, log_every_s=0.5)
    generated, lines = 0, []
    for call in range(40):
        bench.now_s += 7.0
        bench.tick()
        bench.submit(f"r{call}", [1, 2, 3], max_new=7, ignore_eos=True)
        while f"r{call}" not in bench.finish:
            bench.tick()
            bench.now_s += 0.009
            if len(caplog.messages) > len(lines):
                now = bench.scheduler.committer.num_generated
                lines.append((now - generated, caplog.messages[-1]))
                generated = now
    assert len(lines) >= 4
    for num_tokens, line in lines:
        rate = int(line.split(" tokens/s")[0].split()[-1])
        assert num_tokens >= 45, "half a second of steps of 10 ms"
        assert 80 <= rate <= 125, line


def test_a_long_prompt_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "radixlm.operations.step_log")
    bench = SchedulerHarness(num_pages=128, step_tokens=8)
    bench.submit("short", [1, 2, 3], max_new=2)
    bench.submit("long", list(range(1, 41)) * 2, max_new=2)
    while "long" not in bench.finish:
        bench.tick()
        bench.now_s += 0.6
    done = [int(line.split(": ")[1].split()[0]) for line in caplog.messages]
    assert all(
        line.startswith("prefill long: ") and "of 80 tokens" in line for line in caplog.messages
    )
    assert len(done) >= 2 and done == sorted(set(done)) and 0 < done[0] and done[-1] < 80
    gaps = {b - a for a, b in pairwise(done)}
    assert gaps == {32}, "four steps of eight tokens are 2.4 s"
    rates = [float(line.split(" tokens/s")[0].split()[-1]) for line in caplog.messages]
    assert all(11 <= rate <= 15 for rate in rates), "8 tokens in 0.601 s"


def test_the_rate_is_known_within_the_first_second() -> None:
    bench = SchedulerHarness()
    bench.submit("r", [1, 2, 3], max_new=12, ignore_eos=True)
    for _ in range(8):
        bench.tick()
        bench.now_s += 0.01
    assert bench.scheduler.load(bench.now_s).gen_throughput > 50
