"""least_work: seconds that cached prefixes save against seconds of waiting."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from radixlm.base.record import replace
from radixlm.router.call import Call
from radixlm.router.kv_index import KvIndex, Match
from radixlm.router.options import Options
from radixlm.router.policies import least_work
from radixlm.router.policies.least_work import LeastWork
from radixlm.router.policies.table import make
from radixlm.router.prefix_hashes import PLAIN
from radixlm.router.prompt import Holdings, id_prompt, plain_prompt
from radixlm.router.worker import Load, State, Worker

OPTIONS = replace(Options(), block_size=16)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(least_work, "time", made)
    return made


class World:
    """Workers, a policy and an index that tells what some of them hold."""

    def __init__(self, num_workers: int, trusted: bool = True) -> None:
        self.workers = [Worker(f"http://w{i}:1") for i in range(num_workers)]
        for worker in self.workers:
            worker.state = State.READY
        self.index = KvIndex()
        readers = SimpleNamespace(
            index=self.index,
            matched=self.index.matched,
            is_complete=lambda name: trusted,
        )
        self.policy = make("least_work", OPTIONS)
        assert isinstance(self.policy, LeastWork)
        self.holdings = Holdings(lambda: readers if trusted else None, OPTIONS)  # type: ignore[arg-type, return-value]
        self.policy.holdings = self.holdings
        self.num_calls = 0

    def holds(self, worker: Worker, ids: list[int], names: int = 0) -> None:
        hashes = range(names, names + len(ids) // 16)
        assert self.index.stored(worker.name, hashes, None, np.array(ids, np.int32), 16)

    def call(self, ids: list[int], **fields: Any) -> Call:
        call = Call("POST", "/generate", "", [], orjson.dumps({"input_ids": ids} | fields))
        self.num_calls += 1
        call.request_id = str(self.num_calls)
        call.prompt = plain_prompt(call, PLAIN)
        return call

    def choose(self, ids: list[int]) -> Worker:
        return self.policy.choose(self.call(ids), self.workers)


def test_a_prefix_is_worth_the_time_that_it_saves_and_no_more(clock: Clock) -> None:
    world = World(3)
    prompt = list(range(5000))
    world.holds(world.workers[1], prompt[:4000])
    assert world.choose(prompt) is world.workers[1]
    clock.now_s += 10
    # 4000 tokens save 0.8 s at 5000 tokens a second: 0.02 s a request in flight are less until 40
    world.workers[1].num_inflight = 39
    assert world.choose(prompt) is world.workers[1]
    clock.now_s += 10
    world.workers[1].num_inflight = 45
    assert world.choose(prompt[:4500]) is not world.workers[1]  # the prefix lives twice from here


def test_a_burst_of_one_prefix_is_spread_by_the_queue_it_makes(clock: Clock) -> None:
    world = World(2)
    prompt = list(range(4000))
    world.holds(world.workers[0], prompt[:2496])
    # each computes 1504 tokens (0.3 s) on the holder, 4000 (0.8 s) elsewhere: the third waits less
    asked = [[*prompt[:2496], *range(i, i + 1504)] for i in (10**6, 2 * 10**6, 3 * 10**6)]
    holder, other = world.workers
    assert [world.choose(ids) for ids in asked] == [holder, holder, other]


def test_prompts_without_any_cached_prefix_are_spread_at_random() -> None:
    world = World(4)
    counts = Counter[str]()
    for number in range(400):
        for worker in world.workers:
            world.policy._pace(worker).free_s = 0.0
        counts[world.choose(list(range(number * 50, number * 50 + 40))).url] += 1
    assert len(counts) == 4 and min(counts.values()) > 50


def test_what_was_sent_counts_until_its_events_come_and_not_after_a_flush(clock: Clock) -> None:
    world = World(4)
    prompt = list(range(2000))
    first = world.choose(prompt)
    clock.now_s += 10
    assert all(world.choose(prompt) is first for _ in range(3))
    world.holdings.forget(first.name)  # AllBlocksCleared came
    clock.now_s += 100
    prompt_ids = id_prompt(prompt, PLAIN)
    assert prompt_ids is not None
    assert not world.holdings.of(prompt_ids)


def test_without_events_placements_are_kept_for_a_time(clock: Clock) -> None:
    world = World(4, trusted=False)
    prompt = list(range(2000))
    first = world.choose(prompt)
    clock.now_s += 10
    assert all(world.choose([*prompt, 1, 2, 3]) is first for _ in range(3))
    asked = id_prompt(prompt, PLAIN)
    assert asked is not None
    assert world.holdings.of(asked) == {first.name: 1984}
    for turn in range(3):
        world.holdings.tick(1000.0 * (turn + 1))
    assert not world.holdings.of(asked)
    text = Call("POST", "/generate", "", [], orjson.dumps({"text": "a long story " * 50}))
    text.prompt = plain_prompt(text, PLAIN)
    first = world.policy.choose(text, world.workers)
    clock.now_s += 10
    assert all(world.policy.choose(text, world.workers) is first for _ in range(3))


def test_a_full_cache_makes_new_tokens_dearer(clock: Clock) -> None:
    world = World(2)
    full, empty = world.workers
    prompt, others = list(range(1600)), list(range(10_000, 11_600))
    world.holds(full, prompt[:320])
    world.holds(full, others, names=1000)
    for worker in world.workers:
        world.policy.joined(worker)
        worker.facts["max_total_num_tokens"] = 2000
    assert world.choose(prompt) is full  # 1280 tokens to compute, not 1600
    clock.now_s += 100
    world.policy.tick(clock.now_s)
    assert world.policy._pace(full).eviction == 1.5 and world.policy._pace(empty).eviction == 1.0
    assert world.choose([*prompt[:320], *range(20_000, 21_280)]) is empty


def test_load_that_workers_tell_counts() -> None:
    world = World(2)
    world.workers[0].load = Load(num_queued_tokens=10_000)
    assert all(world.choose([i] * 20) is world.workers[1] for i in range(5))
    world.workers[0].load, world.workers[1].load = Load(kv_usage=0.95), Load(kv_usage=0.1)
    world.policy.tick(0.0)
    assert world.choose(list(range(20))) is world.workers[1]


def test_rates_are_learned_from_the_times_to_the_first_event(clock: Clock) -> None:
    world = World(1)
    [worker] = world.workers
    for _ in range(100):
        call = world.call(list(range(world.num_calls * 2000, world.num_calls * 2000 + 1000)))
        world.policy.choose(call, world.workers)
        call.first_s, call.num_events = clock.now_s + 0.5, 11
        clock.now_s += 1.5
        world.policy.ended(call, worker, cached_tokens=0)
    pace = world.policy._pace(worker)
    assert pace.rate == pytest.approx(2000, rel=0.01)
    assert pace.step_s == pytest.approx(0.1, rel=0.01)
    assert not world.policy._sent
    newcomer = Worker("http://new:1")
    assert world.policy._pace(newcomer).rate == pace.rate
    call = world.call([1])
    world.policy.choose(call, world.workers)
    world.policy.left(worker)
    world.policy.ended(call, worker, cached_tokens=0)
    assert worker.id not in world.policy._paces


def test_the_predicted_tokens_are_those_of_the_index() -> None:
    world = World(2)
    prompt = list(range(100))
    world.holds(world.workers[0], prompt[:64])
    call = world.call(prompt)
    worker = world.policy.choose(call, world.workers)
    world.policy.ended(call, worker, cached_tokens=64)
    assert (worker, world.policy.num_predicted) == (world.workers[0], 64)
    assert world.policy.num_cached == 64
    assert world.index.matched(np.array(prompt, np.int32)) == {worker.name: Match(64, 64)}
