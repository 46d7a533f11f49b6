"""Each policy against what its docstring says. Draws are seeded."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from radixlm.base.errors import ConfigError
from radixlm.router.call import Call
from radixlm.router.policies import table
from radixlm.router.policies.base import NoChoice, Policy, least
from radixlm.router.policies.manual import Manual
from radixlm.router.worker import Load, Worker

OPTIONS = SimpleNamespace(
    cache_threshold=0.3,
    balance_abs_threshold=4,
    balance_rel_threshold=1.5,
    max_tree_size=1 << 20,
    bucket_adjust_interval_secs=5,
    assignment_mode="random",
    max_idle_secs=100,
    prefix_token_count=256,
    prefix_hash_load_factor=1.25,
    overload_token_usage_threshold=1.0,
    balance_token_usage_threshold=1.0,
    least_load_kv_pressure_weight=0.15,
    least_load_default_throughput=2000.0,
    api_key=None,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(7)


def options(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(OPTIONS), **changes})


def pool(policy: Policy, count: int, start: int = 0) -> list[Worker]:
    workers = [Worker(f"http://w{start + i}:1") for i in range(count)]
    for worker in workers:
        policy.joined(worker)
    return workers


def ask(text: str = "hi", **headers: str) -> Call:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    named = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Call("POST", "/v1/chat/completions", "", named, body)


def shares(policy: Policy, workers: list[Worker], calls: list[Call]) -> Counter[str]:
    return Counter(policy.choose(call, workers).url for call in calls)


@pytest.mark.parametrize("name", sorted(table.POLICIES))
def test_every_policy_chooses_among_the_workers_that_it_is_given(name: str) -> None:
    policy = table.make(name, OPTIONS)
    assert policy.name == name
    workers = pool(policy, 4)
    for i in range(40):
        some = random.sample(workers, 1 + i % 3)
        chosen = policy.choose(ask(f"{i}" * (1 + i * 97), x_smg_routing_key=f"k{i % 5}"), some)
        assert chosen in some
        policy.ended(ask(), chosen, cached_tokens=None)
        policy.tick(float(i))
        if i == 20:
            policy.left(workers.pop())


@pytest.mark.parametrize(
    "name", ["random", "power_of_two", "least_load", "cache_aware", "prefix_hash", "bucket"]
)
def test_idle_workers_share_distinct_prompts(name: str) -> None:
    """The reference sent all of them to the first worker, one request at a time."""
    policy = table.make(name, OPTIONS)
    workers = pool(policy, 2)
    calls = [ask(random.randbytes(10 + 80 * i).hex()) for i in range(60)]
    assert min(shares(policy, workers, calls).values()) >= 12


def test_an_unknown_policy_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="--policy: 'best' is none of random, round_robin"):
        table.make("best", OPTIONS)


def test_least_draws_ties_at_random() -> None:
    workers = [Worker(f"http://w{i}:1") for i in range(3)]
    workers[0].num_inflight = 1
    assert {least(workers).url for _ in range(40)} == {"http://w1:1", "http://w2:1"}


def test_round_robin_goes_round() -> None:
    policy = table.make("round_robin", OPTIONS)
    workers = pool(policy, 3)
    assert [policy.choose(ask(), workers) for _ in range(6)] == workers * 2


def test_power_of_two_never_takes_the_busiest() -> None:
    policy = table.make("power_of_two", OPTIONS)
    workers = pool(policy, 3)
    workers[1].num_inflight = 5
    found = shares(policy, workers, [ask()] * 40)
    assert set(found) == {"http://w0:1", "http://w2:1"}


def test_least_load_weighs_queue_rate_and_kv_cache() -> None:
    policy = table.make("least_load", OPTIONS)
    slow, fast = pool(policy, 2)
    slow.load, fast.load = Load(100, 0.1, 100.0), Load(500, 0.1, 5000.0)
    assert policy.choose(ask(), [slow, fast]) is fast  # 1 s against 0.1 s
    fast.load = Load(500, 0.95, 5000.0)  # and 0.15 x 19 s
    assert policy.choose(ask(), [slow, fast]) is slow
    light = table.make("least_load", options(least_load_kv_pressure_weight=0.01))
    assert light.choose(ask(), [slow, fast]) is fast  # 0.1 + 0.19 s
    slow.load, fast.load = Load(600, 0.1), Load(100, 0.7)  # no rates: 0.32 s against 0.4 s
    assert policy.choose(ask(), [slow, fast]) is slow
    slower = table.make("least_load", options(least_load_default_throughput=100.0))
    assert slower.choose(ask(), [slow, fast]) is fast  # 6 s against 1.35 s


class TestCacheAware:
    def test_a_prefix_stays_with_its_worker(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        workers = pool(policy, 4)
        system = "You are a helper. " * 20
        first = policy.choose(ask(system + "one"), workers)
        assert all(policy.choose(ask(system + f"{i}"), workers) is first for i in range(20))

    def test_a_short_match_goes_to_the_least_loaded(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        workers = pool(policy, 2)
        first = policy.choose(ask("a" * 100), workers)
        first.num_inflight = 1
        assert policy.choose(ask("a" * 20 + "b" * 400), workers) is not first

    def test_an_overloaded_worker_loses_only_its_own_affinity(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        one, two, three = workers = pool(policy, 3)
        for worker, letter in ((one, "a"), (two, "b")):
            assert policy.choose(ask(letter * 300), [worker]) is worker
        one.num_inflight, two.num_inflight = 50, 3
        assert policy.choose(ask("a" * 300), workers) is three
        assert policy.choose(ask("b" * 300), workers) is two

    @pytest.mark.parametrize(
        ("option", "limit", "usages"),
        [
            ("overload_token_usage_threshold", 0.9, (0.95, 0.9, 0.5)),
            ("balance_token_usage_threshold", 0.3, (0.81, 0.79, 0.5)),
        ],
    )
    def test_a_worker_whose_kv_cache_is_full_gets_nothing_new(
        self, option: str, limit: float, usages: tuple[float, ...]
    ) -> None:
        policy = table.make("cache_aware", options(**{option: limit}))
        assert policy.wants_load and not table.make("cache_aware", OPTIONS).wants_load
        hot, warm, cool = workers = pool(policy, 3)
        for worker, letter in ((hot, "a"), (warm, "b")):
            assert policy.choose(ask(letter * 300), [worker]) is worker
        assert policy.choose(ask("a" * 300), workers) is hot  # none has told its load
        for worker, usage in zip(workers, usages, strict=True):
            worker.load = Load(0, usage)
        warm.num_inflight = 1
        assert policy.choose(ask("a" * 300), workers) is cool
        assert policy.choose(ask("b" * 300), workers) is warm
        assert policy.choose(ask("b" * 300), [hot]) is hot  # better than nobody

    def test_a_worker_that_left_is_forgotten(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        one, two = pool(policy, 2)
        policy.choose(ask("a" * 300), [one])
        policy.left(one)
        new = Worker("http://new:1")
        policy.joined(new)  # takes the bit of the one that left
        two.num_inflight, new.num_inflight = 0, 1
        assert policy.choose(ask("a" * 300), [two, new]) is two

    @pytest.mark.parametrize(
        ("path", "key"), [("/generate", "text"), ("/generate", "input_ids"), ("/x", "query")]
    )
    def test_what_stands_before_the_prompt_does_not_count(self, path: str, key: str) -> None:
        policy = table.make("cache_aware", OPTIONS)
        workers = pool(policy, 8)
        bodies = [orjson.dumps({"rid": "r" * 9 * i, key: "a" * 300}) for i in range(20)]
        calls = [Call("POST", path, "", [], body) for body in bodies]
        assert len(shares(policy, workers, calls)) == 1

    def test_less_than_a_page_goes_to_the_least_loaded(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        one, two = pool(policy, 2)
        call = Call("POST", "/generate", "", [], b'{"text":"hi"}')
        assert policy.choose(call, [one]) is one
        one.num_inflight = 1
        assert policy.choose(call, [one, two]) is two

    def test_more_workers_than_a_word_has_bits(self) -> None:
        policy = table.make("cache_aware", OPTIONS)
        workers = pool(policy, 130)
        first = {i: policy.choose(ask(f"{i:04}" * 90), workers) for i in range(130)}
        for i, worker in first.items():
            assert policy.choose(ask(f"{i:04}" * 90), workers) is worker


class TestManual:
    def test_a_key_stays_and_nothing_moves_to_new_workers(self) -> None:
        policy = table.make("manual", OPTIONS)
        workers = pool(policy, 3)
        keys = [ask(x_smg_routing_key=f"k{i}") for i in range(30)]
        first = [policy.choose(key, workers) for key in keys]
        workers += pool(policy, 2, 3)
        assert [policy.choose(key, workers) for key in keys] == first
        assert policy.branches == {"vacant": 30, "occupied_hit": 30}

    def test_a_key_has_two_workers_and_returns_to_the_first(self) -> None:
        policy = table.make("manual", OPTIONS)
        one, two, three = pool(policy, 3)
        key = ask(x_smg_routing_key="k")
        assert [policy.choose(key, [w]) for w in (one, two)] == [one, two]
        assert policy.choose(key, [one, two]) is one
        policy.choose(key, [three])  # a third pushes out the first
        assert policy.choose(key, [one, two]) is two

    def test_long_keys_are_told_apart_and_not_kept(self) -> None:
        policy = table.make("manual", OPTIONS)
        workers = pool(policy, 8)
        keys = [ask(x_smg_routing_key="k" * 60_000 + str(i)) for i in range(9)]
        first = [policy.choose(key, workers) for key in keys]
        assert [policy.choose(key, workers) for key in keys] == first
        assert policy.branches == {"vacant": 9, "occupied_hit": 9}
        assert isinstance(policy, Manual) and max(map(len, policy._sessions)) <= 64

    def test_min_group_gives_a_new_key_to_the_worker_with_the_fewest(self) -> None:
        policy = table.make("manual", options(assignment_mode="min_group"))
        workers = pool(policy, 3)
        calls = [ask(x_smg_routing_key=f"k{i}") for i in range(9)]
        assert set(shares(policy, workers, calls).values()) == {3}

    def test_min_load_gives_a_new_key_to_the_least_loaded(self) -> None:
        policy = table.make("manual", options(assignment_mode="min_load"))
        one, two = workers = pool(policy, 2)
        one.num_inflight = 1
        assert policy.choose(ask(x_smg_routing_key="k"), workers) is two

    def test_workers_that_left_are_not_counted(self) -> None:
        policy = Manual("min_group", 100)
        for start in range(5):
            workers = pool(policy, 1, start)
            policy.choose(ask(x_smg_routing_key="k"), workers)
            policy.left(workers[0])
        assert not policy._num_keys

    def test_idle_keys_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = SimpleNamespace(monotonic=lambda: now.s, s=0.0)
        monkeypatch.setattr("radixlm.router.policies.manual.time", now)
        policy = table.make("manual", OPTIONS)
        workers = pool(policy, 2)
        for now.s, key in ((0.0, "old"), (60.0, "new")):
            policy.choose(ask(x_smg_routing_key=key), workers)
        policy.tick(90.0)
        assert policy.num_keys == 2
        policy.tick(101.0)
        assert policy.num_keys == 1

    def test_a_field_of_the_body_is_a_key_too(self) -> None:
        policy = table.make("manual", OPTIONS)
        call = Call("POST", "/generate", "", [], b'{"text":"a","routing_key":"k"}')
        assert len({policy.choose(call, pool(policy, 3)).id for _ in range(1)}) == 1
        assert policy.num_keys == 1


class TestConsistentHashing:
    def test_one_worker_more_moves_about_its_share(self) -> None:
        policy = table.make("consistent_hashing", OPTIONS)
        workers = pool(policy, 4)
        keys = [ask(x_smg_routing_key=f"user-{i}") for i in range(400)]
        before = [policy.choose(key, workers) for key in keys]
        assert min(Counter(w.url for w in before).values()) > 50
        workers += pool(policy, 1, 4)
        after = [policy.choose(key, workers) for key in keys]
        moved = [new for old, new in zip(before, after, strict=True) if old is not new]
        assert 40 < len(moved) < 130
        assert {w.id for w in moved} == {workers[-1].id}

    def test_an_unavailable_worker_returns_to_its_keys(self) -> None:
        policy = table.make("consistent_hashing", OPTIONS)
        workers = pool(policy, 4)
        key = ask(x_smg_routing_key="user")
        first = policy.choose(key, workers)
        others = [worker for worker in workers if worker is not first]
        assert policy.choose(key, others) is not first
        assert policy.choose(key, workers) is first

    def test_a_target_is_an_index_of_the_pool(self) -> None:
        policy = table.make("consistent_hashing", OPTIONS)
        workers = pool(policy, 3)
        assert policy.choose(ask(x_smg_target_worker="2"), workers) is workers[2]
        with pytest.raises(NoChoice, match="'3' is none of 0 to 2"):
            policy.choose(ask(x_smg_target_worker="3"), workers)
        with pytest.raises(NoChoice, match="'9999"):
            policy.choose(ask(x_smg_target_worker="9" * 5000), workers)
        with pytest.raises(NoChoice, match="worker 2 takes no requests now"):
            policy.choose(ask(x_smg_target_worker="2"), workers[:2])

    @pytest.mark.parametrize(("api_key", "count"), [(None, 1), ("shared", 3)])
    def test_a_shared_api_key_is_no_session(self, api_key: str | None, count: int) -> None:
        policy = table.make("consistent_hashing", options(api_key=api_key))
        calls = [ask(authorization="Bearer shared")] * 40
        assert len(shares(policy, pool(policy, 3), calls)) == count


class TestPrefixHash:
    def test_equal_prefixes_meet_until_their_worker_is_busy(self) -> None:
        policy = table.make("prefix_hash", OPTIONS)
        workers = pool(policy, 4)
        prefix = "x" * 2000
        first = policy.choose(ask(prefix + "1"), workers)
        assert policy.choose(ask(prefix + "2"), workers) is first
        first.num_inflight = 9
        second = policy.choose(ask(prefix + "3"), workers)
        assert second is not first
        assert policy.choose(ask(prefix + "4"), workers) is second


class TestBucket:
    def test_ranges_follow_recent_lengths(self) -> None:
        policy = table.make("bucket", OPTIONS)
        short, long = workers = pool(policy, 2)
        assert policy.choose(ask("a" * 10), workers) is short
        assert policy.choose(ask("a" * 9000), workers) is long
        for _ in range(100):
            policy.choose(ask("a" * 9000), workers)
            policy.choose(ask("a" * 20_000), workers)
        policy.tick(policy._adjusted_s + 4)  # too early
        assert policy.choose(ask("a" * 9000), workers) is long
        policy.tick(policy._adjusted_s + 5)
        assert policy.choose(ask("a" * 9000), workers) is short
        assert policy.choose(ask("a" * 30_000), workers) is long

    def test_work_is_about_equal(self) -> None:
        policy = table.make("bucket", OPTIONS)
        workers = pool(policy, 3)
        calls = [ask("a" * int(random.paretovariate(1.5) * 100)) for _ in range(2000)]
        for call in calls:
            policy.choose(call, workers)
        policy.tick(policy._adjusted_s + 5)
        done: Counter[str] = Counter()
        for call in calls:
            done[policy.choose(call, workers).id] += len(call.body)
        assert max(done.values()) < 1.25 * min(done.values())

    def test_imbalance_goes_to_the_least_loaded(self) -> None:
        policy = table.make("bucket", OPTIONS)
        short, long = workers = pool(policy, 2)
        short.num_inflight = 9
        assert policy.choose(ask("a"), workers) is long
