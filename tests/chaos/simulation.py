"""TokenizerManager, scheduler and a model in one thread, with faults at random.

The engine may die anywhere in a tick: messages that it sent before arrive, later ones are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from radixlm.engine.features.inflight_log import InflightLog, read_inflight_rid
from radixlm.engine.intake import ServerIntake
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest, Output
from radixlm.intake.request_state import RequestState
from radixlm.self_check.kv_cache import find_violations
from radixlm.step.plan import StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.replies import ControlReply
from radixlm.wire.requests import Control
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.executor import VOCAB, FakeExecutor, FakeStep
from tests.fakes.scheduler_harness import SchedulerHarness
from tests.fakes.tiers import DictTier, make_arrivals, new_feature


class Death(Exception):
    """The engine process is gone."""


class MortalExecutor(FakeExecutor):
    """An executor that may die before each part of a step."""

    def __init__(self, *args: Any, strike: Callable[[str, StepPlan], None]) -> None:
        super().__init__(*args)
        self.strike = strike

    def forward(self, plan: StepPlan) -> FakeStep:
        self.strike("forward", plan)
        return super().forward(plan)

    def read(self, step: FakeStep) -> StepResult:
        self.strike("read", step.plan)
        return super().read(step)


class Wire:
    """The link of intake: it puts messages into the inbox of the running scheduler."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.handler: Callable[[Any], None] = lambda message: None

    def start(self, handler: Callable[[Any], None]) -> None:
        self.handler = handler

    def send(self, message: Any) -> None:
        if self.world.bench is not None:
            self.world.bench.mine.send(message)

    def close(self) -> None:
        """Nothing to free."""


class Client:
    """One request and the tokens that its reader received."""

    def __init__(
        self, state: RequestState, prompt: list[int], max_new: int, ignore_eos: bool
    ) -> None:
        self.state, self.prompt, self.max_new, self.ignore_eos = state, prompt, max_new, ignore_eos
        self.ids: list[int] = []
        self.end: Output | None = None
        self.has_left = False

    def read(self) -> None:
        output = self.state.read() if not self.has_left else None
        if output is not None:
            assert self.end is None, "something came after the end"
            self.ids += output.token_ids
            assert output.completion_tokens == len(self.ids)
            self.end = output if output.finish is not None else None


class World:
    """The whole simulation, from one seed."""

    def __init__(
        self, seed: int, folder: Path, tiers: Sequence[DictTier] = (), **limits: Any
    ) -> None:
        self.rng, self.tiers = random.Random(seed), tiers
        self.copies: list[DictTier] = []
        self.flight = folder / "flight"
        self.limits = limits
        self.bench: SchedulerHarness | None = None
        self.clients: list[Client] = []
        self.num_deaths = 0
        self.num_retracted = 0
        self.death_rate = 0.0
        self.poison: int | None = None  # a prompt with this token kills the engine that computes it
        self.wire = Wire(self)
        self.intake = ServerIntake(None, IntakeFacts(vocab=VOCAB, context_len=512), self.wire)
        self.intake.start()
        self.start_engine()

    def start_engine(self) -> None:
        flight, arrivals = InflightLog(self.flight), new_feature(4)
        features = (flight, arrivals) if self.tiers else (flight,)
        self.bench = bench = SchedulerHarness(features=features, **self.limits)
        old = bench.executor
        bench.executor = bench.scheduler.executor = MortalExecutor(  # type: ignore[assignment]
            len(old.kv), old.page_size, len(old.table), strike=self.strike
        )
        if self.tiers:  # they outlive the engine
            tiers = [copy(tier) for tier in self.tiers]
            self.copies += tiers
            make_arrivals(bench.executor, bench.kv_manager, tiers, self.rng, arrivals)
        self.intake.become_ready({"context_len": 512})

    def strike(self, where: str, plan: StepPlan) -> None:
        if self.poison is not None and where == "forward":
            chunks = [i.tokens.tolist() for i in plan.items if i.tokens is not None]
            if any(self.poison in chunk for chunk in chunks):
                raise Death(where)
        if self.rng.random() < self.death_rate:
            raise Death(where)

    def submit(self, prompt: list[int], max_new: int, ignore_eos: bool = True) -> Client:
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=ignore_eos)
        request = GenerateRequest(sampling, input_ids=prompt, stream=True)
        (state,) = self.intake.submit(request)
        self.clients.append(Client(state, prompt, max_new, ignore_eos))
        return self.clients[-1]

    def calm_down(self, max_ticks: int) -> None:
        """Run without deaths until no request runs, or for `max_ticks` ticks."""
        self.death_rate = 0.0
        for _ in range(max_ticks):
            self.control("continue")
            self.tick()
            if not self.intake.requests:
                break

    def tick(self) -> None:
        """One tick of the scheduler; then its messages reach intake."""
        assert self.bench is not None
        try:
            self.bench.scheduler.tick(wait=False)
        except Death:
            self.die()
            return
        self.bench.now_s += 0.001
        self.deliver()

    def deliver(self) -> None:
        assert self.bench is not None
        for message in self.bench.mine.receive(0):
            if not isinstance(message, ControlReply):
                self.wire.handler(message)

    def die(self) -> None:
        """The engine dies as the supervisor sees it; sometimes the next one dies during its
        start."""
        self.deliver()
        assert self.bench is not None
        self.num_deaths += 1
        self.num_retracted += self.bench.scheduler.planner.num_retracted
        self.bench = None
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            poison_rid = read_inflight_rid(self.flight)
            self.flight.unlink(missing_ok=True)
            self.intake.lose_engine(poison_rid)
        self.start_engine()

    def control(self, verb: str, **args: Any) -> None:
        self.wire.send(Control(f"chaos {verb}", verb, args))

    def check_invariants(self) -> None:
        """After all requests ended, every slot and page is free or in the radix tree."""
        assert self.bench is not None and not self.intake.requests
        for _ in range(3):
            self.tick()
        scheduler, kv_manager = self.bench.scheduler, self.bench.kv_manager
        assert not scheduler.planner.running and not len(scheduler.queue)
        assert not scheduler.committer.requests and not scheduler.inflight
        assert find_violations(kv_manager) == [] and scheduler.controls.num_breaches == 0
        scheduler.hooks.flush()
        kv_manager.prefix_cache.reset()
        assert kv_manager.num_used_tokens == 0
