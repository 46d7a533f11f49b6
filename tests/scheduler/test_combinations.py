"""Features together, drawn at random: each request gets the tokens that it gets alone, in a plain
scheduler without a drafter, chunks or company.

A case draws a world (pages, windows, budget, cache, drafter) and requests of all kinds; requests
come, end and are aborted at drawn times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixlm.config.grammar import GrammarConfig
from radixlm.engine.features.grammar import GrammarFeature
from radixlm.engine.features.token_rules import TokenRules
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.self_check.kv_cache import find_violations
from radixlm.speculative.drafting import Drafting
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    GrammarSpec,
    LogprobParams,
    StreamingWindow,
    pack_ids,
)
from tests.engine.test_features import _Marked
from tests.engine.test_features_drafts import MATCHERS
from tests.fakes.drafts import ForcedDrafts
from tests.fakes.executor import EOS, VOCAB
from tests.fakes.quick import first
from tests.fakes.scheduler_harness import SchedulerHarness
from tests.fakes.tiers import DictTier, make_arrivals, make_port, new_feature

POLICIES = ("auto", "best_effort", "wait_complete", "timeout")
# what keeps steps from going on by themselves
ALONE = ("states", "stages", "depth", "waits_for_chunks", "max_micro_batch", "groups")
UNTREED = ("states", "stages", "depth", "waits_for_chunks", "max_micro_batch")
KINDS = ("none", "own", "oracle", "mixed", "adversary", "random", "broken")


class Drafts(ForcedDrafts):
    """ "own": no drafter, only predictions and what grammars force."""

    def drafting(self, limits: Limits, kv_manager: KVCacheManager, hooks: Hooks) -> Drafting:
        drafter = None if self.kind == "own" else self
        return Drafting(limits, kv_manager, hooks, self, drafter)  # type: ignore[arg-type]


def features(matcher: str, jump: bool, depth: int = 0) -> tuple[Feature, ...]:
    """A grammar feature whose grammars are seeds of a scripted matcher, and token rules."""
    config = GrammarConfig(disable_jump_forward=not jump)
    grammar = GrammarFeature(config, lambda: None, VOCAB, (EOS,), depth == 0)  # type: ignore[arg-type,return-value]
    make = MATCHERS[matcher]
    grammar._ticket = lambda spec, client: SimpleNamespace(  # type: ignore[assignment,method-assign,return-value]
        is_ready=True, matcher=lambda: make(int(spec.value), 18)
    )
    grammar._tokenizer = _Marked({7: b"<", 11: b"/>"})  # type: ignore[assignment]
    return grammar, TokenRules(VOCAB)


def draw_request(rng: random.Random, family: Sequence[int]) -> dict[str, Any]:
    """The fields of a request; prompts share beginnings."""
    prompt = [*family[: rng.randint(0, len(family))], rng.randint(1, VOCAB - 1)]
    fields: dict[str, Any] = {"prompt": prompt, "max_new": rng.choice([1, 2, 3, 7, 25, 40])}
    fields["ignore_eos"] = rng.random() < 0.5
    fields["stream"] = rng.random() < 0.5
    if rng.random() < 0.4:
        after = rng.choice([None, ".", "/>"])
        fields["grammar"] = GrammarSpec("regex", str(rng.randint(0, 99)), after=after)
    if rng.random() < 0.3:
        words = [[rng.randint(1, 9) for _ in range(rng.randint(1, 3))] for _ in range(6)]
        fields["bad_words"] = tuple(tuple(word) for word in words)
    if rng.random() < 0.2:
        fields["logprobs"] = LogprobParams()
    if random.Random(sum(prompt)).random() < 0.25:
        fields["streaming"] = StreamingWindow(rng.choice([8, 16, 30]), rng.choice([1, 4]))
    return fields


def draw_world(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4, 16])
    world: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": rng.choice([80, 160, 640]) // page_size,
        "step_tokens": rng.choice([8, 16, 64, 256]),
        "mixed": rng.random() < 0.8,
        "radix": rng.random() < 0.8,
        "reserve": rng.choice([0.0, 0.4]),
        "max_running": rng.choice([2, 8]),
    }
    if rng.random() < 0.3:
        world |= {"window": rng.choice([3, 9]), "num_window": 640 // page_size}
    return world


def draw_stages(rng: random.Random) -> dict[str, Any]:
    """Pipeline stages or groups of data-parallel attention, recurrent models, sparse outputs."""
    stages, states = rng.choice([1, 1, 2, 3, 5]), rng.random() < 0.25
    found: dict[str, Any] = {"window": 0, "states": True, "num_window": 160} if states else {}
    if stages > 1:
        found |= {"stages": stages, "depth": stages - 1, "waits_for_chunks": states}
        found["max_micro_batch"] = rng.choice([None, 1, 3])
    elif rng.random() < 0.6:
        found["groups"] = 2
    if rng.random() < 0.3:
        found["target_itl_s"] = rng.choice([1e-3, 1e-2, None])
    if rng.random() < 0.3:  # output tokens that are not shared
        found["first_sparse"] = rng.choice([0, 9, 30])
    return found


def with_few_pages(world: dict[str, Any]) -> dict[str, Any]:
    """As few pages of windows or states as an engine gives them (``engine/memory.py``)."""
    size, window, step = world["page_size"], world.get("window", 0), world["step_tokens"]
    if world.get("states"):
        return world | {"num_window": 1 + 4 * world["max_running"]}
    if not window:
        return world
    return world | {"num_window": 1 + -(-window // size) - (-(window + step) // size) + 3}


def with_trees(world: dict[str, Any], seed: int) -> tuple[dict[str, Any], str]:
    """A world and a drafter in which further paths are verified."""
    kept = {name: value for name, value in world.items() if name not in UNTREED}
    return kept | {"step_tokens": 4 * world["step_tokens"]}, "adversary" if seed % 2 else "mixed"


def with_passes(world: dict[str, Any], passes: int, matcher: str) -> dict[str, Any]:
    """A world whose steps may decode so many tokens in turn."""
    kept = {name: value for name, value in world.items() if name not in ALONE}
    kept["window"] = 0 if "states" in world else kept.get("window", 0)
    if matcher == "unmasked":  # spells forced text otherwise where it finds no pages
        kept["num_pages"] = 640 // world["page_size"]
    return kept | {"max_passes": passes}


def alone(world: dict[str, Any], request: dict[str, Any]) -> tuple[list[int], Any]:
    """The tokens and the end of a request that has the engine for itself."""
    fields = {**request}
    harness = SchedulerHarness(features=features(world["matcher"], world["jump"]), step_tokens=512)
    harness.submit("r", fields.pop("prompt"), fields.pop("max_new"), **fields)
    harness.run()
    end = harness.finish["r"]
    return harness.out["r"], (end.kind, end.matched, end.status)


def oracle_of(wanted: dict[str, list[int]], prompts: dict[str, list[int]]) -> Any:
    def oracle(rid: str, ids: Sequence[int], count: int) -> list[int]:
        done = len(ids) - len(prompts[rid])
        return wanted[rid][done : done + count]

    return oracle


def predicted(rng: random.Random, output: list[int]) -> bytes:
    """The output with some tokens changed, left out or doubled."""
    text = [rng.choice([[t], [t], [t], [t], [], [t, t], [rng.randint(1, 9)]]) for t in output]
    return pack_ids([token for part in text for token in part])


def filled_tiers(
    rng: random.Random, world: dict[str, Any], prompts: dict[str, list[int]]
) -> list[DictTier]:
    """Two tiers with some of the pages that an engine before has computed."""
    plain = {name: world[name] for name in ("page_size", "window", "states") if name in world}
    window = 1 if world.get("states") else world.get("window", 0)
    feature, tiers = new_feature(world["page_size"], window), [DictTier(), DictTier("storage")]
    harness = SchedulerHarness(num_pages=640, num_window=640, features=(feature,), **plain)
    make_arrivals(harness.executor, harness.kv_manager, tiers, rng, feature, eagerness=1.0)
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, 3)
    harness.run()
    feature.flush()
    for tier in tiers:
        tier.lose(rng, rng.random())
    return tiers


def release(harness: SchedulerHarness, rng: random.Random) -> bool:
    """Give the KV cache back and take it again, as an operator does; whether it was possible."""
    commands: list[tuple[str, dict[str, Any]]] = [
        ("pause", {"mode": "retract"}),
        ("release_memory", {"tags": ["kv_cache"]}),
        ("continue", {}),
        ("resume_memory", {"tags": ["weights", "kv_cache"]}),
    ]
    for verb, args in commands:
        harness.mine.send(Control(verb, verb, args))
        for _ in range(rng.choice([1, 1, 3])):
            harness.tick()
    replies = [reply for reply in harness.replies if isinstance(reply, ControlReply)]
    assert [reply.ok for reply in replies[-4:]].count(False) <= 1
    return replies[-3].ok


def check_answers(harness: SchedulerHarness, answers: dict[str, Any], seed: int) -> None:
    """Each request has the tokens and the end that it has alone; an aborted one the first."""
    for rid, (tokens, end) in answers.items():
        got = harness.finish[rid]
        if got.kind == "abort":
            assert harness.out[rid] == tokens[: len(harness.out[rid])], seed
        else:
            assert harness.out[rid] == tokens, (seed, rid)
            assert (got.kind, got.matched, got.status) == end, (seed, rid)


def play(seed: int, paths: int = 0, passes: int = 1) -> tuple[int, ...]:
    """One case, with trees of so many further ``paths``, with ``passes`` of a step. How many tokens
    were drafted, accepted and given by further paths, how often memory was released, how many
    tokens steps went on to, and how many of them with masks."""
    rng = random.Random(seed)
    world, kind = draw_world(rng), rng.choice(KINDS)
    world |= draw_stages(random.Random(~seed))
    world, kind = with_trees(world, seed) if paths else (world, kind)
    meant = {"matcher": rng.choice(sorted(MATCHERS)), "jump": rng.random() < 0.7}
    if passes != 1:
        world = with_passes(world, passes, meant["matcher"])
        kind = "none" if seed % 2 else kind
    world = with_few_pages(world) if seed % 3 else world
    family = [rng.randint(1, VOCAB - 1) for _ in range(24)]
    requests = {f"r{i}": draw_request(rng, family) for i in range(rng.randint(1, 6))}
    answers = {rid: alone(meant, request) for rid, request in requests.items()}
    outputs = {rid: tokens for rid, (tokens, _) in answers.items()}
    prompts = {rid: request["prompt"] for rid, request in requests.items()}
    drafts = None
    if kind != "none":
        most = rng.choice([1, 2, 3, 7])
        oracle = oracle_of(outputs, prompts)
        drafts = Drafts(oracle, kind, most, varies=rng.random() < 0.5, seed=seed, paths=paths)
        for rid, request in requests.items():
            if rng.random() < 0.4 and outputs[rid]:
                request["prediction"] = predicted(rng, outputs[rid])
    parts: tuple[Feature, ...] = features(meant["matcher"], meant["jump"])
    chance = random.Random(seed ^ 0x5A5A)
    arrivals = None
    if world["radix"] and chance.random() < 0.4:
        window = 1 if world.get("states") else world.get("window", 0)
        arrivals = new_feature(world["page_size"], window, policy=chance.choice(POLICIES))
        parts = (*parts, arrivals)
    harness = SchedulerHarness(features=parts, drafts=drafts, **world)
    if passes != 1:
        harness.executor.goes_on = seed % 5 > 0
    if arrivals is not None:
        arrivals._clock = arrivals.rules._clock = lambda: harness.now_s
        groups = getattr(harness.executor, "groups", [harness.executor])
        ports = [
            make_port(one, filled_tiers(chance, world, prompts), chance, arrivals) for one in groups
        ]
        arrivals.bind(harness.kv_manager, ports)
    operator, num_released = random.Random(seed ^ 0x3C3C), 0
    for rid, request in requests.items():
        harness.submit(rid, request.pop("prompt"), request.pop("max_new"), **request)
        for _ in range(rng.choice([0, 0, 1, 4])):
            harness.tick()
        assert find_violations(harness.kv_manager, harness.scheduler.planner.running) == [], seed
        if operator.random() < 0.1:
            num_released += release(harness, operator)
        if rng.random() < 0.1:
            harness.mine.send(AbortRequest(rids=(rng.choice(sorted(requests)),)))
    harness.run()
    check_answers(harness, answers, seed)
    further = [getattr(harness.executor, name, 0) for name in ("num_further", "num_followed")]
    rounds = [one for each in drafts.rounds.values() for one in each] if drafts else []
    drafted, accepted = np.array(rounds, np.int64).reshape(-1, 2).sum(0).tolist()
    return drafted, accepted, drafts.num_gained if drafts else 0, num_released, *further


@pytest.mark.parametrize("start", first(3, range(0, 240, 40)))
def test_drawn_cases(start: int) -> None:
    cases = [play(seed) for seed in range(start, start + 40)]
    drafted, accepted, _, num_released, *_ = np.sum(cases, axis=0)
    assert drafted > accepted > 50
    assert num_released > 2


def test_drawn_trees() -> None:
    """The same with trees of drafts, where these are verified."""
    cases = [play(seed, 2 + seed % 5) for seed in range(3000, 3040)]
    assert np.sum(cases, axis=0)[2] > 100


def test_drawn_continuations() -> None:
    """The same with several tokens in turn."""
    cases = [play(seed, passes=(0, 2, 5, 40)[seed % 4]) for seed in range(6000, 6060)]
    num_further, num_followed = np.sum(cases, axis=0)[4:]
    assert num_further > 200
    assert num_followed > 50  # under a grammar


@pytest.mark.slow
def test_many_drawn_continuations() -> None:
    for seed in range(6060, 8060):
        play(seed, passes=(0, 2, 5, 40)[seed % 4])


@pytest.mark.slow
def test_many_drawn_cases() -> None:
    for seed in range(240, 2240):
        play(seed)


@pytest.mark.slow
def test_many_drawn_trees() -> None:
    for seed in range(3040, 5040):
        play(seed, 2 + seed % 5)


def test_an_end_behind_a_marker_of_the_same_step() -> None:
    """Tokens in turn that pass the marker before a grammar, and then end the output."""
    play(7263, passes=40)
