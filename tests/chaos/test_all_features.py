"""All features at once: log-probabilities, hidden states, forced and masked tokens, stops,
priorities and deadlines, in a small pool whose engine dies, pauses and retracts. Each request must
receive what it would receive alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixlm.base.record import replace
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.request_state import RequestState
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.masks import Mask, Masks
from radixlm.step.plan import Item
from radixlm.step.result import ItemResult
from radixlm.wire.replies import Logprobs
from radixlm.wire.requests import GrammarSpec, LogprobParams
from radixlm.wire.sampling_params import SamplingParams
from tests.chaos.simulation import MortalExecutor, World
from tests.fakes.executor import EOS, VOCAB, FakeStep, next_token
from tests.fakes.scheduler_harness import SchedulerHarness

ALL = np.array([(1 << VOCAB) - 1], np.int32)


def score(prefix: Sequence[int], token: int) -> float:
    """The log-probability of `token` after `prefix` in the fake model."""
    return -float(zlib.crc32(np.array([*prefix, token], np.int32).tobytes()) % 1000)


def allowed(kind: str, place: int) -> Mask:
    """Tokens that the grammar `kind` allows at the n-th position of the output; sometimes a single
    one, for several positions in a row."""
    lot = zlib.crc32(f"{kind} {place // 4}".encode())
    if lot % 3 == 0:
        return np.array([1 << (1 + (lot >> 8) % (VOCAB - 1))], np.int32)
    return np.array([ALL[0] & ~(1 << (lot >> 4) % VOCAB)], np.int32)


class Grammar(Feature):
    """Masks and forced tokens like those of the real grammar feature."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[str, int, bool]] = {}
        self.asked: dict[str, int] = {}

    def arrive(self, request: Request) -> bool:
        wire = request.wire
        if wire.grammar is None:
            return False
        may_jump = wire.logprobs is None and not wire.return_hidden_states
        self.states[request.rid] = (wire.grammar.value, request.num_output, may_jump)
        return True

    def ready(self, request: Request) -> bool:
        """Ready at the second call."""
        self.asked[request.rid] = self.asked.get(request.rid, 0) + 1
        return request.wire.grammar is None or self.asked[request.rid] > 1

    def masks(self, items: Sequence[Item]) -> Masks:
        found = Masks()
        for index, item in enumerate(items):
            if item.emit and item.rid in self.states:
                kind, place, _ = self.states[item.rid]
                found[index] = allowed(kind, place)
        return found

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        if request.rid in self.states:
            kind, place, may_jump = self.states[request.rid]
            self.states[request.rid] = (kind, place + len(tokens), may_jump)

    def forced(self, request: Request) -> Sequence[int]:
        if request.rid not in self.states:
            return ()
        kind, place, may_jump = self.states[request.rid]
        found: list[int] = []
        while may_jump and (bits := int(allowed(kind, place + len(found))[0])).bit_count() == 1:
            found.append(bits.bit_length() - 1)
        return found

    def release(self, request: Request) -> None:
        self.states.pop(request.rid, None)
        self.asked.pop(request.rid, None)


class DetailedExecutor(MortalExecutor):
    """An executor that returns log-probabilities and hidden states with the tokens."""

    def sample(self, step: FakeStep, masks: Masks) -> None:
        super().sample(step, masks)
        for item, got in zip(step.plan.items, step.results, strict=True):
            self.tell(item, got)

    def tell(self, item: Item, got: ItemResult) -> None:
        ids = self.prefix(item.slot, item.start + item.count).tolist()
        if got.tokens and item.logprobs is not None:
            got.logprobs = Logprobs([(score(ids, got.tokens[0]), got.tokens[0])], [], [])
        if item.targets is not None:
            first = item.start + item.targets_at
            need = item.logprobs
            assert need is not None
            is_start = first == 0 and need.prompt_from == 0
            chosen: list[Any] = [(None, ids[0])] if is_start else []
            for place, target in enumerate(item.targets.tolist(), first):
                chosen.append((score(ids[: place + 1], target), target))
            got.prompt_logprobs = Logprobs(chosen, [], [])
        if item.hidden_states:
            places = range(item.start, item.start + item.count)
            rows = [[place, zlib.crc32(bytes(ids[: place + 1])) % 1000] for place in places]
            got.hidden_states = np.array(rows, np.float32).tobytes()


class FeatureWorld(World):
    """A world with a grammar and the detailed executor."""

    def start_engine(self) -> None:
        self.intake.facts = replace(self.intake.facts, hidden_states_enabled=True)
        self.grammar = Grammar()
        self.flights = InflightLog(self.flight)
        self.bench = bench = SchedulerHarness(features=(self.flights, self.grammar), **self.limits)
        old = bench.executor
        bench.executor = bench.scheduler.executor = DetailedExecutor(
            len(old.kv),
            old.page_size,
            len(old.table),
            len(old.window_kv),
            old.window,
            strike=self.strike,
        )
        self.intake.become_ready({"context_len": 512})


class CheckedClient:
    """A request with all features, its reader, and the expected output."""

    def __init__(self, world: FeatureWorld) -> None:
        rng = world.rng
        self.prompt = [7] * rng.choice((0, 9, 21)) + rng.choices(
            range(1, VOCAB), k=rng.randint(1, 30)
        )
        self.stops = tuple(rng.choices(range(VOCAB), k=rng.choice((0, 0, 2))))
        new = rng.choice((0, 1, 2, 7, 20, 40))
        self.sampling = SamplingParams(
            max_new_tokens=new,
            min_new_tokens=rng.choice((0, 0, min(new, 9))),
            temperature=0.0,
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=self.stops,
            stream_interval=rng.choice((None, None, 3)),
        )
        self.need = LogprobParams(rng.choice((-1, 0, 1, 5, 25))) if rng.random() < 0.5 else None
        if self.need is not None and self.need.prompt_from >= len(self.prompt):
            self.need = LogprobParams()
        self.hidden = rng.random() < 0.3
        self.kind = rng.choice(("", "", "a", "b", "c"))
        self.out = Output()
        self.has_left = self.was_aborted = False
        request = GenerateRequest(
            self.sampling,
            input_ids=list(self.prompt),
            stream=rng.random() < 0.6,
            logprobs=self.need,
            return_hidden_states=self.hidden,
            extra_key=rng.choice((None, None, "x")),
            priority=rng.randint(-20, 20),
            grammar=GrammarSpec("regex", self.kind) if self.kind else None,
        )
        self.state: RequestState
        (self.state,) = world.intake.submit(request)

    def read(self) -> None:
        found = self.state.read() if not self.has_left else None
        if found is not None:
            assert self.out.finish is None, "something came after the end"
            self.out.absorb(found)

    def check(self) -> str:
        """Check the finish reason, and that the output equals the request's output alone."""
        if self.has_left:
            return "left"
        finish, ids = self.out.finish, list(self.prompt)
        assert finish is not None
        want: list[int] = []
        chosen: list[Any] = []
        kind = "length"
        for place in range(self.sampling.max_new_tokens or 0):
            token = next_token(np.array(ids), allowed(self.kind, place) if self.kind else None)
            chosen.append((score(ids, token), token))
            ids.append(token)
            want.append(token)
            ends = (*self.stops, *(() if self.sampling.ignore_eos else (EOS,)))
            if token in ends and len(want) >= self.sampling.min_new_tokens:
                kind = "stop"
                break
        got = self.out.token_ids
        if finish.kind == "abort":
            assert self.was_aborted and got == want[: len(got)]
            return "abort"
        if finish.kind == "error":
            return "error"
        assert (got, finish.kind) == (want, kind)
        if self.need is not None:
            told = self.out.logprobs.chosen if self.out.logprobs else []
            assert [tuple(c) for c in told] == chosen
            assert self.prompt_told() == self.prompt_want()
        if self.hidden:
            rows = np.frombuffer(b"".join(self.out.hidden_states or ()), np.float32).reshape(-1, 2)
            num_computed = len(self.prompt) + max(len(want) - 1, 0)
            wanted = [[p, zlib.crc32(bytes(ids[: p + 1])) % 1000] for p in range(num_computed)]
            assert rows.tolist() == wanted
        return kind

    def prompt_told(self) -> list[Any]:
        told = self.out.prompt_logprobs
        return [tuple(c) for c in told.chosen] if told else []

    def prompt_want(self) -> list[Any]:
        assert self.need is not None
        if self.need.prompt_from < 0:
            return []
        places = range(self.need.prompt_from, len(self.prompt))
        return [
            (score(self.prompt[:p], self.prompt[p]) if p else None, self.prompt[p]) for p in places
        ]


def _disturb(world: FeatureWorld, all_told: list[CheckedClient], most: int) -> None:
    rng = world.rng
    kinds = ("nothing", "submit", "leave", "abort", "pause", "continue", "flush_cache")
    kind = rng.choices(kinds, (8, 8, 1, 1, 1, 3, 1))[0]
    running = [t for t in all_told if t.out.finish is None and not t.has_left and not t.state.ended]
    if kind == "submit" and len(all_told) < most:
        all_told.append(CheckedClient(world))
    elif kind in ("leave", "abort") and running:
        told = rng.choice(running)
        told.read()
        if kind == "leave":
            told.has_left = True
            world.intake.leave([told.state])
        else:
            told.was_aborted = True
            world.intake.abort(told.state.rid)
    elif kind == "pause":
        world.control("pause", mode=rng.choice(("in_place", "retract")))
    elif kind in ("continue", "flush_cache"):
        world.control(kind)


def _run(
    seed: int, folder: Path, death_rate: float, most: int = 40, **limits: Any
) -> dict[str, int]:
    world = FeatureWorld(seed, folder, **limits)
    world.death_rate = death_rate
    all_told: list[CheckedClient] = []
    for _ in range(4 * most):
        _disturb(world, all_told, most)
        world.tick()
        for told in all_told:
            if world.rng.random() < 0.3:
                told.read()
    world.calm_down(4000)
    assert world.bench is not None
    retracted = world.num_retracted + world.bench.scheduler.planner.num_retracted
    ends: dict[str, int] = {"retracted": retracted, "deaths": world.num_deaths}
    for told in all_told:
        told.read()
        end = told.check()
        ends[end] = ends.get(end, 0) + 1
    world.check_invariants()
    assert not world.grammar.states
    assert not world.bench.outputs.num_buffered
    return ends


@pytest.mark.parametrize("seed", range(6))
async def test_each_request_gets_what_it_gets_alone(seed: int, tmp_path: Path) -> None:
    limits = {"depth": seed % 2, "page_size": (1, 4, 16)[seed % 3], "reserve": 0.0}
    if seed % 2:
        limits |= {"priorities": True, "policy": "lpm", "admit_every": 3}
    if seed == 4:
        limits |= {"window": 9, "num_window": 60}
    pages = -(-91 // int(limits["page_size"])) + 1  # the longest request fits alone
    ends = _run(seed, tmp_path, 0.01 * (seed // 2), num_pages=pages, **limits)
    assert ends["retracted"] and ends["length"] > 10
    assert ends.get("error", 0) == 0
