"""What the ring and the moments tell of steps, against the plans that the executor got."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.fakes.scheduler_harness import SchedulerHarness, draw_prompts

from radixlm.live_feed.step_recorder import LONG_PREFILL
from radixlm.observe.ring import FIELDS, StepRing
from radixlm.step.plan import Items
from radixlm.wire.replies import ControlReply, Heartbeat, Moment, StepReply
from radixlm.wire.requests import Control


def column(ring: StepRing, name: str) -> list[float]:
    return [record[1 + FIELDS.index(name)] for record in ring.read(0)]


def moments(bench: SchedulerHarness) -> list[Moment]:
    replies = [reply for reply in bench.replies if isinstance(reply, StepReply)]
    return [moment for reply in replies for moment in reply.moments]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_records_tell_what_the_steps_computed(depth: int) -> None:
    ring = StepRing()
    bench = SchedulerHarness(400, depth=depth, ring=ring)
    for i, prompt in enumerate(draw_prompts(random.Random(depth), 12, shared=12)):
        bench.submit(f"r{i}", prompt, 9)
    bench.run()
    plans = [Items.of(plan.items) for plan in bench.executor.steps]
    assert column(ring, "decodes") == [len(plan.starts) for plan in plans]
    assert column(ring, "prefill_tokens") == [sum(i.count for i in p.prefills) for p in plans]
    assert set(column(ring, "budget")) == {bench.limits.step_tokens}
    chunks = [moment for moment in moments(bench) if moment[1] == "prefill" and moment[3]]
    items = [item for plan in plans for item in plan.prefills]
    assert [(m[0], m[4], m[5]) for m in chunks] == [(i.rid, i.count, i.start) for i in items]


def test_a_preempted_request_is_told_of() -> None:
    ring = StepRing()
    bench = SchedulerHarness(num_pages=24, reserve=0.0, ring=ring)
    for i, prompt in enumerate(draw_prompts(random.Random(3), 6, shared=0)):
        bench.submit(f"r{i}", prompt[:8], 40, ignore_eos=True)
    bench.run()
    told = moments(bench)
    count = bench.scheduler.planner.num_retracted
    assert count == sum(m[1] == "retracted" for m in told) == sum(column(ring, "retracted")) > 0
    victim = next(m for m in told if m[1] == "retracted")
    load = bench.scheduler.load(bench.scheduler.clock())
    assert load.num_prefilled == sum(column(ring, "prefill_tokens")) > 0
    assert load.num_generated == 6 * 40
    later = [m for m in told[told.index(victim) + 1 :] if m[0] == victim[0]]
    assert later[0][1] == "prefill" and later[0][2] >= victim[2]
    evicted = bench.kv_manager.prefix_cache.num_evicted
    assert sum(column(ring, "evicted")) <= evicted and evicted > 0


def test_a_long_prefill_is_told_of_before_it_runs() -> None:
    bench = SchedulerHarness(400, step_tokens=512, max_prefill_tokens=512, ring=StepRing())
    seen: list[Any] = []
    forward = bench.executor.forward
    bench.executor.forward = lambda plan: (seen.extend(bench.mine.receive(0)), forward(plan))[1]
    bench.submit("long", [1 + i % 30 for i in range(LONG_PREFILL)], 2)
    bench.tick()
    (reply,) = [one for one in seen if isinstance(one, StepReply)]
    ((rid, kind, _, end_s, tokens, first),) = reply.moments
    assert (rid, kind, end_s, tokens, first) == ("long", "prefill", 0.0, LONG_PREFILL, 0)


def test_without_a_ring_nothing_is_collected() -> None:
    bench = SchedulerHarness(400)
    bench.submit("r", [1, 2, 3], 4)
    bench.run()
    assert bench.scheduler.recorder is None and moments(bench) == []


def test_pages_are_counted_by_owner() -> None:
    bench = SchedulerHarness(100, ring=StepRing())
    bench.submit("r", list(range(1, 18)), 20)
    for _ in range(4):
        bench.tick()
    pages, manager = bench.scheduler.load(bench.now_s).pages, bench.kv_manager
    assert pages is not None and pages.size == bench.limits.page_size
    assert pages.total == manager.pages.num_total and pages.free == manager.pages.num_free
    assert pages.locked == manager.prefix_cache.num_locked > 0
    held = sum(len(r.pages[: r.num_allocated // pages.size]) for r in manager.requests if r)
    assert pages.total - pages.free == held
    bench.run()
    assert any(isinstance(reply, Heartbeat) and reply.load.pages for reply in bench.replies)


@pytest.mark.parametrize("num_pages", [400, 40])
def test_the_tree_is_walked_in_slices(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks while prompts come and go gets every node that stays, with its ancestors."""
    monkeypatch.setattr("radixlm.live_feed.tree_view.SLICE_S", 0.0)  # a stride a turn
    monkeypatch.setattr("radixlm.live_feed.tree_view.IDLE_SLICE_S", 0.0)
    bench = SchedulerHarness(num_pages)
    for i, prompt in enumerate(draw_prompts(random.Random(5), 30, shared=10)):
        bench.submit(f"r{i}", prompt, 3)
    for call in range(3):
        bench.mine.send(Control(f"call{call}", "tree", {"with_ids": call == 0}))
    bench.run()
    bench.mine.send(Control("last", "tree", {"with_ids": True}))
    for _ in range(400):
        bench.tick()
    got = {r.call_id: r.data for r in bench.replies if isinstance(r, ControlReply)}
    assert set(got) == {"call0", "call1", "call2", "last"}
    for tree in got.values():
        serials = {node[0] for node in tree["nodes"]}
        assert len(serials) == len(tree["nodes"])
        assert all(node[1] in serials or node[1] == 0 for node in tree["nodes"])
    cache: Any = bench.kv_manager.prefix_cache
    nodes = {node.serial: node for node in cache.tree.nodes()}
    shown = {row[0]: row for row in got["last"]["nodes"]}
    assert set(shown) == set(nodes) and got["last"]["rest"] == {"nodes": 0, "tokens": 0}
    for serial, node in nodes.items():
        _, _, tokens, hits, locks, age_s, _, ids = shown[serial]
        assert (4 * tokens, hits, locks) == (len(node.tokens), node.num_hits, node.num_locks)
        assert len(ids) == min(tokens, 48) and age_s >= 0


def test_only_the_most_used_nodes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.live_feed.tree_view.NUM_BEST", 5)
    bench = SchedulerHarness(400)
    prompts = draw_prompts(random.Random(6), 20, shared=0)
    for turn in range(3):
        for i, prompt in enumerate(prompts[: 20 >> (2 * turn)]):
            bench.submit(f"r{turn}-{i}", prompt * 2, 1)
        bench.run()
    bench.mine.send(Control("a", "tree", {}))
    for _ in range(50):
        bench.tick()
    (tree,) = [r.data for r in bench.replies if isinstance(r, ControlReply)]
    cache: Any = bench.kv_manager.prefix_cache
    hits = sorted((node.num_hits for node in cache.tree.nodes()), reverse=True)
    shown = sorted((node[3] for node in tree["nodes"]), reverse=True)
    assert shown[:5] == hits[:5] and len(shown) < len(hits)
    assert tree["rest"]["nodes"] == len(hits) - len(shown)
    assert tree["total_tokens"] - tree["rest"]["tokens"] == sum(n[2] for n in tree["nodes"])


def test_a_path_is_the_longest_of_any_namespace() -> None:
    bench = SchedulerHarness(400)
    prompt = [1 + i % 30 for i in range(40)]
    bench.submit("short", prompt[:12], 1, cache_salt="a")
    bench.submit("long", prompt, 1, cache_salt="b")
    bench.run()
    page = bench.limits.page_size
    found = _path(bench, prompt)
    cache: Any = bench.kv_manager.prefix_cache
    assert found["tokens"] == len(prompt) // page * page
    nodes = {node.serial: node for node in cache.tree.nodes()}
    assert sum(len(nodes[serial].tokens) // 4 for serial in found["path"]) >= found["tokens"]
    assert _path(bench, [9, 9, 9, 9, 9]) == {"path": [], "tokens": 0}


def _path(bench: SchedulerHarness, ids: list[int]) -> Any:
    reply = bench.scheduler.controls.answer(Control("path", "tree_path", {"ids": ids}))
    assert reply is not None and reply.ok
    return reply.data
