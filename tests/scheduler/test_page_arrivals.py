"""Pages that arrive, in a whole scheduler over a fake executor whose pages hold what was written:
every request gets the tokens that it gets alone, whatever comes late, in part, or never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import radixlm.engine.features.page_arrivals as arrivals_module
import radixlm.tiers.worker as worker_module
from radixlm.base.errors import InvariantError
from radixlm.engine.features.page_arrivals import PageArrivals
from radixlm.engine.features.page_puts import WriteBack, WriteThrough
from radixlm.self_check.kv_cache import find_violations, repair
from radixlm.tiers.base import Cancel, Lookup
from radixlm.wire.requests import AbortRequest, Control
from radixlm.wire.transfer import Hint
from tests.fakes.executor import reference
from tests.fakes.quick import first
from tests.fakes.scheduler_harness import SchedulerHarness, draw_prompts
from tests.fakes.tiers import DictTier, TurnPort, make_arrivals, new_feature


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BATCH_BYTES", 64)
    monkeypatch.setattr(worker_module, "BEHIND_BYTES", 64)


class Bench(SchedulerHarness):
    """A harness with tiers."""

    def __init__(
        self, tiers: Sequence[DictTier], rng: random.Random, eagerness: float = 1.0,
        options: dict[str, Any] | None = None, feature: PageArrivals | None = None, **world: Any,
    ) -> None:  # fmt: skip
        window = 1 if world.get("states") else world.get("window", 0)
        page_size = world.get("page_size", 4)
        self.arrivals = feature or new_feature(page_size, window, **(options or {}))
        others = world.pop("features", ())
        super().__init__(features=(*others, self.arrivals), **world)
        self.arrivals._clock = self.arrivals.rules._clock = lambda: self.now_s
        self.port: TurnPort = make_arrivals(
            self.executor, self.kv_manager, tiers, rng, self.arrivals, eagerness
        )

    def tick(self) -> None:
        super().tick()
        running = self.scheduler.planner.running
        assert find_violations(self.kv_manager, running) == []

    def turns(self, count: int, seconds: float = 0.0) -> None:
        """Ticks of so many seconds."""
        for _ in range(count):
            self.now_s += seconds
            self.tick()

    def drop_cache(self) -> None:
        """As an operator's flush."""
        self.mine.send(Control(call_id="f", verb="flush_cache"))
        self.tick()
        reply = next(r for r in reversed(self.replies) if getattr(r, "call_id", "") == "f")
        assert reply.ok, reply.message
        assert not self.kv_manager.prefix_cache.total_pages


def test_an_evicted_prompt_comes_back_from_the_tier() -> None:
    tier, prompt = DictTier(), list(range(1, 24))
    bench = Bench([tier], random.Random(0))
    bench.submit("a", prompt, 9, ignore_eos=True)
    bench.run()
    bench.drop_cache()
    bench.submit("b", prompt, 9, ignore_eos=True)
    bench.run()
    assert bench.out["b"] == bench.out["a"] == reference(prompt, 9, True)
    assert bench.cached == {"a": 0, "b": 20} and tier.num_got == 5
    delta = [d for r in bench.replies for d in getattr(r, "deltas", ()) if d.rid == "b"][-1]
    assert delta.cached_by_tier == {"host": 20}
    assert bench.scheduler.load(0).tiers["host_tokens"] == 20


def test_the_output_is_kept_too_and_pages_go_on_behind_a_cached_prefix() -> None:
    tier, prompt = DictTier(), list(range(1, 12))
    bench = Bench([tier], random.Random(0))
    bench.submit("a", prompt, 9, ignore_eos=True)
    bench.run()
    whole = prompt + bench.out["a"]
    bench.drop_cache()
    assert len(tier.pages) == (len(whole) - 1) // 4
    bench.submit("b", prompt, 1)
    bench.run()
    bench.submit("c", [*whole, 5], 4)
    bench.run()
    assert bench.cached["b"] == 8 and bench.cached["c"] == 16  # 2 pages of b, 2 more come
    assert tier.num_got == 2 + 2 and bench.out["c"] == reference([*whole, 5], 4)


@pytest.mark.parametrize("length", [24, 25, 30])
@pytest.mark.parametrize("world", [{}, {"window": 9, "num_window": 40}, {"depth": 1}])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_peer_gets_what_was_cached_before(
    length: int, world: dict[str, Any], is_late: bool
) -> None:
    """Of a prompt that is cached whole, nothing is inserted."""
    tier, prompt = DictTier("peer"), list(range(1, 1 + length))
    options = {"is_prefill": True, "puts_late": is_late}
    bench = Bench([tier], random.Random(0), options=options, **world)
    for rid, last, hint in (
        ("a", [], None),
        ("b", [], Hint("h", 1, 1)),
        ("c", [77, 78, 79, 80, 81], Hint("h", 1, 2)),
    ):
        tier.pages = {}
        bench.submit(rid, [*prompt, *last], 1, hint=hint)
        bench.run()
        bench.turns(30)
        assert bool(bench.cached[rid]) == (rid != "a")
        peer = Bench([tier], random.Random(0), **world)
        peer.submit("d", [*prompt, *last], 1)
        peer.run()
        assert peer.cached["d"] >= (length + len(last) - 1) // 4 * 4, rid


def test_requests_of_one_prompt_fetch_it_once() -> None:
    tier, prompt = DictTier(), list(range(1, 30))
    bench = Bench([tier], random.Random(0), eagerness=0.2)
    bench.submit("a", prompt, 2)
    bench.run()
    bench.drop_cache()
    for i in range(5):
        bench.submit(f"b{i}", [*prompt, i + 1], 6)
    bench.run()
    assert tier.num_got == 7
    for i in range(5):
        assert bench.cached[f"b{i}"] >= 28 and bench.out[f"b{i}"] == reference([*prompt, i + 1], 6)


def test_a_prompt_of_most_of_the_pool_comes_back_when_there_is_room() -> None:
    tier, prompt = DictTier(), list(range(1, 62))
    bench = Bench([tier], random.Random(0), options={"policy": "wait_complete"}, num_pages=24)
    bench.submit("a", prompt, 2)
    bench.run()
    bench.drop_cache()
    bench.submit("beside", list(range(100, 140)), 9, ignore_eos=True)
    while not bench.out["beside"]:
        bench.tick()
    bench.submit("b", prompt, 2)
    bench.run()
    assert bench.cached["b"] == 60 and tier.num_got == 15 and bench.out["b"] == bench.out["a"]
    assert bench.out["beside"] == reference(list(range(100, 140)), 9, True)


@pytest.mark.parametrize(
    ("policy", "step_tokens"),
    [("timeout", 8), ("best_effort", 8), ("wait_complete", 8), ("auto", 4), ("auto", 8)],
)
def test_pages_come_when_a_chunked_prompt_has_its_own(policy: str, step_tokens: int) -> None:
    """What has come is not evicted by the next chunks of a running prompt. ``auto`` waits for all
    where a turn brings more than it computes; else it computes what has not come in that time."""
    tier, prompt, beside = DictTier(), list(range(1, 62)), list(range(100, 160))
    bench = Bench(
        [tier], random.Random(0), options={"policy": policy}, num_pages=24, step_tokens=step_tokens
    )
    bench.submit("a", prompt, 2)
    bench.run()
    bench.drop_cache()
    bench.submit("beside", beside, 9, ignore_eos=True)
    bench.turns(3)
    assert bench.scheduler.planner.running[0].is_prefilling
    bench.submit("b", prompt, 2)
    bench.run()
    assert bench.cached["b"] == bench.arrivals.counts["arrived_tokens"] > 20
    assert bench.cached["b"] == 60 or (policy, step_tokens) == ("auto", 8)
    assert bench.out["b"] == bench.out["a"] and bench.out["beside"] == reference(beside, 9, True)


@pytest.mark.parametrize("policy", ["auto", "timeout", "best_effort", "wait_complete"])
def test_how_long_a_request_waits(policy: str) -> None:
    """A storage tier that never answers: only the policy ends the wait."""
    host, storage, prompt = DictTier(), DictTier("storage"), list(range(1, 30))
    bench = Bench([host, storage], random.Random(0), options={"policy": policy})
    bench.submit("a", prompt, 2)
    bench.run()
    bench.drop_cache()
    kept = sorted(host.pages, key=lambda key: host.pages[key].tokens[0])
    for key in kept[3:]:
        del host.pages[key]  # three pages are left in RAM
    found = bench.port.eagerness
    bench.submit("b", prompt, 6)
    for _ in range(4):  # the lookup
        bench.tick()
    bench.port.eagerness = 0.0
    start_s = bench.now_s
    for _ in range(8):
        bench.tick()
    if policy == "best_effort":
        bench.port.eagerness = found
    while "b" not in bench.finish and bench.now_s < start_s + 200:
        bench.now_s += 0.05
        bench.tick()
    waited_s = bench.now_s - start_s
    limits = {"auto": (0, 0.7), "timeout": (0.9, 2.0), "best_effort": (0, 0.7),
              "wait_complete": (59, 62)}[policy]  # fmt: skip
    assert limits[0] <= waited_s <= limits[1]
    assert bench.out["b"] == reference(prompt, 6)
    bench.port.eagerness = 1.0
    bench.run()


def test_a_slow_tier_is_left_alone() -> None:
    tier, prompt = DictTier(), list(range(1, 30))
    bench = Bench([tier], random.Random(0), options={"policy": "auto"})
    rules = bench.arrivals.rules
    bench.submit("a", prompt, 2)
    bench.run()
    rules._tiers.add(1000, 10.0)  # 100 bytes a second
    rules._prefill.add(10_000, 1.0)
    bench.drop_cache()
    bench.submit("b", prompt, 2)
    bench.run()
    assert tier.num_got == 0 and bench.cached["b"] == 0
    for _ in range(60):  # it is tried again some day
        bench.drop_cache()
        bench.submit(f"c{_}", prompt, 2)
        bench.run()
    assert tier.num_got > 0


def test_a_tier_that_raises_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    tier, prompt = DictTier(), list(range(1, 30))
    bench = Bench([tier], random.Random(0))
    for rid in "abc":
        tier.breaks = rid != "a"
        bench.submit(rid, prompt, 6)
        bench.run()
        assert bench.out[rid] == reference(prompt, 6)
        bench.drop_cache()
    assert [r for r in caplog.records if r.levelname == "WARNING"][1:] == []


def draw_world(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4, 16])
    world: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": rng.choice([144, 200, 640]) // page_size,
        "step_tokens": rng.choice([8, 16, 64]),
        "max_running": rng.choice([2, 8]),
        "reserve": rng.choice([0.0, 0.4]),
    }
    kind = rng.choice(["plain", "window", "states"])
    if kind == "window":
        world |= {
            "window": rng.choice([3, 9, 20]),
            "num_window": rng.choice([160, 640]) // page_size,
        }
    elif kind == "states":
        world |= {"states": True, "num_window": rng.choice([24, 160])}
    if kind != "states" and rng.random() < 0.3:
        world["depth"] = 1
    return world


def play(seed: int) -> dict[str, float]:
    """A drawn world: two tiers that lose pages, several engines one after another, aborts."""
    rng = random.Random(seed)
    world, tiers = draw_world(rng), [DictTier(), DictTier("storage")]
    for tier in tiers:
        tier.short = lambda count: rng.randint(0, count) if rng.random() < 0.3 else count
    options: dict[str, Any] = {
        "policy": rng.choice(["auto", "timeout", "best_effort", "wait_complete"]),
        "preload_bytes": 0 if "num_window" in world else 8 * rng.choice([20, 100, 1000]),
    }
    eagerness, at_once = rng.choice([0.1, 0.5, 1.0]), random.Random(~seed).choice([0.0, 0.7])
    prompts = draw_prompts(rng, 8, shared=rng.choice([12, 40]))
    counts: dict[str, float] = {}
    policy = rng.choice([WriteThrough(), WriteBack()])
    feature = None
    for life in range(3):
        window = 1 if world.get("states") else world.get("window", 0)
        feature = feature or new_feature(world["page_size"], window, policy, **options)
        bench = Bench(tiers, rng, eagerness, feature=feature, **world)
        bench.port.at_once = at_once
        feature = bench.arrivals if rng.random() < 0.5 else None
        bench.turns(rng.choice([0, 40]))
        wanted: dict[str, list[int]] = {}
        for i in range(8):
            prompt, length = rng.choice(prompts), rng.randint(1, 20)
            wanted[f"r{i}"] = reference(prompt, length)
            bench.submit(f"r{i}", prompt, length)
            bench.turns(rng.choice([0, 0, 3]), rng.choice([0.0, 0.4]))
            if rng.random() < 0.15:
                bench.mine.send(AbortRequest(rids=(f"r{rng.randint(0, i)}",)))
            if rng.random() < 0.2:
                tiers[rng.randint(0, 1)].lose(rng, rng.random())
        if life < 2 and rng.random() < 0.4:  # the engine dies in the middle
            bench.turns(rng.randint(1, 20))
            bench.port._worker.reset()
        else:
            bench.run()
            if rng.random() < 0.5:
                bench.drop_cache()
        for rid, tokens in wanted.items():
            is_cut = rid not in bench.finish or bench.finish[rid].kind == "abort"
            got = bench.out[rid]
            assert got == (tokens[: len(got)] if is_cut else tokens), (seed, life, rid)
        bench.port.settle(0)  # what is left of a life may do no harm
        for name, value in bench.arrivals.stats().items():
            counts[name] = counts.get(name, 0) + value
    return counts


def total(seeds: range) -> dict[str, float]:
    counts: dict[str, float] = {}
    for seed in seeds:
        for name, value in play(seed).items():
            counts[name] = counts.get(name, 0) + value
    return counts


@pytest.mark.parametrize("start", first(2, range(0, 36, 12)))
def test_drawn_worlds(start: int) -> None:
    counts = total(range(start, start + 12))
    for name in ("arrived", "kept", "host", "storage", "preloaded"):
        assert counts[f"{name}_tokens"] > 0, name
    assert counts["late_requests"] > 0


@pytest.mark.slow
def test_many_drawn_worlds() -> None:
    total(range(100, 600))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_any_seed(seed: int) -> None:
    play(seed)


def preloading(tier: DictTier, max_tokens: int = 1000, **world: Any) -> Bench:
    """A server that starts with a tier that another one has filled."""
    return Bench([tier], random.Random(1), options={"preload_bytes": 8 * max_tokens}, **world)


def fill(tier: DictTier, *prompts: list[int]) -> None:
    bench = Bench([tier], random.Random(0), options={"preload_bytes": 1}, num_pages=1000)
    for i, prompt in enumerate(prompts):
        bench.submit(f"p{i}", prompt, 1)
        bench.run()
        bench.port.settle(0)


def test_pages_are_back_before_a_prompt_asks_for_them() -> None:
    tier, prompt = DictTier("storage"), list(range(1, 30))
    fill(tier, prompt)
    bench = preloading(tier)
    bench.turns(20)
    assert tier.num_got == 7 and bench.kv_manager.reservations.num_spare == 7
    assert bench.kv_manager.num_used_tokens == 0  # they are anybody's
    bench.submit("a", prompt, 9)
    bench.run()
    assert bench.cached["a"] == 28 and bench.out["a"] == reference(prompt, 9)
    assert not [c for c in bench.port.log if isinstance(c, Lookup)]
    assert bench.arrivals.stats()["claimed_tokens"] == 28
    delta = [d for r in bench.replies for d in getattr(r, "deltas", ()) if d.rid == "a"][-1]
    assert delta.cached_by_tier == {"storage": 28}


def test_a_start_waits_for_pages_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "PRELOAD_POLL_S", 0.0)
    tier, prompt = DictTier("storage"), list(range(1, 30))
    fill(tier, prompt)
    bench = preloading(tier)
    bench.arrivals.preload(1.0)
    assert bench.kv_manager.reservations.num_spare == 7
    hanging = preloading(tier, num_pages=100)
    hanging.port.eagerness = 0.0
    hanging.arrivals._clock = count(0.0, 0.1).__next__
    hanging.arrivals.preload(1.0)
    assert not hanging.kv_manager.reservations.num_spare


def test_what_was_used_last_comes_back() -> None:
    tier, prompts = DictTier("storage"), [list(range(9 * i + 1, 9 * i + 10)) for i in range(9)]
    fill(tier, *prompts, prompts[3])  # the last one from the KV cache
    bench = preloading(tier, max_tokens=8)
    bench.turns(20)
    assert tier.num_got == 2
    bench.submit("a", prompts[3], 1)
    bench.run()
    assert tier.num_got == 2 and bench.cached["a"] == 8


def test_pages_that_nobody_asked_for_make_room() -> None:
    tier = DictTier("storage")
    fill(tier, list(range(1, 42)))
    bench = preloading(tier, num_pages=24)
    bench.turns(20)
    assert bench.kv_manager.reservations.num_spare == 10
    prompt = list(range(50, 100))
    bench.submit("a", prompt, 30, ignore_eos=True)
    bench.run()
    assert bench.out["a"] == reference(prompt, 30, True)
    assert bench.kv_manager.reservations.num_spare < 4
    bench.drop_cache()
    assert bench.kv_manager.pages.num_free == bench.kv_manager.pages.num_total


def test_a_request_does_not_wait_for_pages_that_nobody_asked_for() -> None:
    tier, prompt = DictTier("storage"), list(range(1, 30))
    fill(tier, prompt)
    bench = preloading(tier)
    while not bench.kv_manager.reservations.num_spare:
        bench.tick()
    bench.port.eagerness = 0.0  # the tier hangs
    bench.submit("a", [7, 8, 9], 5)
    bench.tick()
    assert isinstance(bench.port.log[-1], Cancel)
    while "a" not in bench.finish:
        bench.now_s += 1.0
        bench.tick()
    assert bench.out["a"] == reference([7, 8, 9], 5)
    bench.port.eagerness = 1.0
    bench.turns(20, 1.0)  # then it goes on
    assert bench.kv_manager.reservations.num_spare == 7


def test_no_page_comes_back_after_a_flush() -> None:
    fill(tier := DictTier("storage"), list(range(1, 42)))
    for num_turns in (0, 1, 2, 3):  # before the tier tells of its pages, while they come
        bench = preloading(tier)
        bench.turns(num_turns)
        bench.drop_cache()
        bench.turns(20, 1.0)
        assert bench.kv_manager.pages.num_free == bench.kv_manager.pages.num_total


def test_write_back_copies_what_would_be_evicted_next() -> None:
    tier = DictTier()
    bench = Bench([tier], random.Random(0), feature=new_feature(4, 0, WriteBack()), num_pages=81)
    prompts = {f"r{i}": [i + 1, *range(60, 70), i] for i in range(30)}  # 3 pages each
    for rid in list(prompts)[:20]:
        bench.submit(rid, prompts[rid], 1)
        bench.run()
    assert not tier.pages  # there is room
    for rid in list(prompts)[20:]:
        bench.submit(rid, prompts[rid], 1)
        bench.run()
        bench.turns(4)
    num_evicted = bench.kv_manager.prefix_cache.num_evicted
    assert num_evicted < len(tier.pages) <= num_evicted + 15
    for rid, prompt in prompts.items():
        bench.submit(f"{rid} again", prompt, 1)
        bench.run()
        bench.turns(4)
        assert bench.cached[f"{rid} again"] >= 8, rid
        assert bench.out[f"{rid} again"] == bench.out[rid] == reference(prompt, 1)


def test_the_check_knows_pages_on_their_way() -> None:
    bench = Bench([DictTier()], random.Random(0))
    kv_manager, reservations = bench.kv_manager, bench.arrivals._groups[0].reservations
    reserved = reservations.reserve(3)
    assert reserved is not None and find_violations(kv_manager) == []
    assert reservations.reserve(99) is None
    reservations.reserved.popitem()
    (violation,) = find_violations(kv_manager)
    assert violation.startswith("full: the allocator has 3 pages held by requests, 2 are: 1 leaked")
    repair(kv_manager)
    assert find_violations(kv_manager) == []
    with pytest.raises(InvariantError, match="is not reserved"):
        reservations.release(reserved[0])


def test_pages_that_wait_for_drafts_are_free_after_a_retraction() -> None:
    """With a draft model pages are put at a request's end; until then they must not keep another
    one from running."""
    tier = DictTier()
    bench = Bench([tier], random.Random(0), options={"puts_late": True}, num_pages=24,
                  max_running=2, reserve=0.0)  # fmt: skip
    prompts = {rid: list(range(first, first + 20)) for rid, first in (("a", 1), ("b", 31))}
    for rid, prompt in prompts.items():
        bench.submit(rid, prompt, 60, ignore_eos=True)
    bench.run()
    assert bench.scheduler.planner.num_retracted
    for rid, prompt in prompts.items():
        assert bench.out[rid] == reference(prompt, 60, True)
    bench.drop_cache()
    assert len(tier.pages) == 2 * ((20 + 60 - 1) // 4)


def test_a_flush_that_a_tier_holds_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([DictTier()], random.Random(0), eagerness=0.0, options={"policy": "auto"})
    bench.submit("a", list(range(1, 24)), 2)
    while "a" not in bench.finish:
        bench.now_s += 1.0
        bench.tick()
    with monkeypatch.context() as patch:
        patch.setattr(bench.port, "settle", lambda timeout_s: [])
        with pytest.raises(AssertionError, match="a slow tier still reads pages; try again"):
            bench.drop_cache()
    bench.drop_cache()


def test_pages_do_not_come_where_the_next_step_copies_from() -> None:
    """A page that a hit copies is nobody's: it may be evicted for another request before the step
    that reads it is launched, and the host tier's pages come at once."""
    tier, prompt, short = DictTier(), list(range(1, 62)), list(range(100, 107))
    bench = Bench([tier], random.Random(0), num_pages=18, priorities=True)
    bench.submit("a", prompt, 2)
    bench.run()
    bench.drop_cache()
    bench.submit("short", short, 1)
    bench.run()
    bench.port.at_once = 1.0
    bench.submit("beside", list(range(200, 220)), 6, ignore_eos=True)
    bench.tick()
    bench.submit("b", prompt, 2)  # waits for room
    while "beside" not in bench.finish:
        bench.tick()
    bench.submit("hit", [*short, 7], 3, ignore_eos=True, priority=5)
    bench.run()
    assert bench.cached["hit"] == 7 and bench.out["hit"] == reference([*short, 7], 3, True)
    assert bench.cached["b"] == 60 and bench.out["b"] == bench.out["a"]
