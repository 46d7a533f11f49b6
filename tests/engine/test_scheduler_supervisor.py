"""An exception in a step: the model stays loaded, the requests restart, and the one that caused it
fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixlm.base.errors import CheckpointError
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.engine.intake import ServerIntake
from radixlm.engine.scheduler_supervisor import MAX_FAILURES, SchedulerSupervisor
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.intake.request_state import RequestState
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.loop import Scheduler
from radixlm.scheduler.request import Request
from radixlm.self_check.kv_cache import find_violations
from radixlm.step.plan import StepPlan
from radixlm.wire.link import Handler
from radixlm.wire.requests import Control
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.executor import VOCAB, FakeExecutor, FakeStep, reference
from tests.fakes.scheduler_harness import SchedulerHarness

POISON = 30


class Ill(FakeExecutor):
    """Raises in a step that computes the poison."""

    error: Callable[[], Exception] = MemoryError

    def forward(self, plan: StepPlan) -> FakeStep:
        if any(i.tokens is not None and POISON in i.tokens.tolist() for i in plan.items):
            raise self.error()
        return super().forward(plan)


class Choosy(Feature):
    """Raises on the arrival of a request with the poison."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    def arrive(self, request: Request) -> bool:
        if POISON in request.ids.tolist():
            raise self.error()
        return False


class Harness:
    """TokenizerManager and restarted schedulers in one thread; the scheduler runs in `run`."""

    def __init__(self, error: Callable[[], Exception], *more: Feature) -> None:
        self.flight, self.more = InflightLog(), more
        self.mine, self.theirs = (bench := SchedulerHarness()).mine, bench.scheduler.channel
        self.num_made = 0
        self.error = error
        self.handler: Handler = lambda message: None
        self.intake = ServerIntake(None, IntakeFacts(vocab=VOCAB, context_len=512), self)
        self.intake.start()
        self.intake.become_ready({"context_len": 512})
        facts = {"context_len": 512}
        self.serving = SchedulerSupervisor(self.make(), self.make, self.theirs, facts, self.flight)

    def make(self) -> Scheduler:
        """A scheduler that stops when nothing is left to do, so that `run` returns."""
        self.num_made += 1
        bench = SchedulerHarness(num_pages=64, features=(self.flight, *self.more))
        executor = Ill(65, 4, 9)
        executor.error = self.error
        scheduler = bench.scheduler
        scheduler.executor, scheduler.channel = executor, self.theirs
        tick = scheduler.tick

        def once(wait: bool = True) -> None:
            tick(wait=False)
            self.deliver()
            scheduler.is_stopped = not self.intake.requests

        scheduler.tick = once  # type: ignore[method-assign]
        return scheduler

    def start(self, handler: Handler) -> None:
        self.handler = handler

    def send(self, message: object) -> None:
        self.mine.send(message)

    def close(self) -> None:
        """Nothing to free."""

    def deliver(self) -> None:
        for message in self.mine.receive(0):
            self.handler(message)

    def submit(self, prompt: list[int]) -> RequestState:
        sampling = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
        return self.intake.submit(GenerateRequest(sampling, input_ids=prompt, stream=True))[0]


@pytest.mark.parametrize(
    "error", [MemoryError, lambda: RuntimeError("a kernel failed"), lambda: ValueError("x")]
)
async def test_a_poison_request_fails_alone(error: Callable[[], Exception]) -> None:
    house = Harness(error)
    pure = [[i, i + 1] for i in range(1, 20) if POISON not in reference([i, i + 1], 12, True)][:4]
    good = [house.submit(prompt) for prompt in pure]
    bad = house.submit([8, POISON, 9])
    house.serving.run()
    assert house.num_made == 4  # the first run, one failure in a batch, two alone
    end = bad.read()
    assert end is not None and end.finish is not None and not end.token_ids
    assert (end.finish.kind, end.finish.status) == ("error", 500)
    for state, prompt in zip(good, pure, strict=True):
        got = state.read()
        assert got is not None and got.token_ids == reference(prompt, 12, True)
    assert find_violations(house.serving.scheduler.kv_manager) == []


@pytest.mark.parametrize(
    ("error", "times"), [(lambda: ValueError("x"), 2), (lambda: CheckpointError("it is gone"), 0)]
)
async def test_a_request_that_a_feature_refuses_fails_alone(
    error: Callable[[], Exception], times: int
) -> None:
    house = Harness(RuntimeError, Choosy(error))
    good, bad = house.submit([1, 2]), house.submit([8, POISON, 9])
    house.serving.run()
    assert house.num_made == 1 + times  # an exception on purpose costs no request
    end = bad.read()
    assert end is not None and end.finish is not None
    assert (end.finish.kind, end.finish.status) == ("error", 500)
    got = good.read()
    assert got is not None and got.token_ids == reference([1, 2], 12, True)


async def test_repeated_exceptions_are_raised() -> None:
    house = Harness(lambda: RuntimeError("the device is gone"))
    house.make = lambda: house.serving.scheduler  # type: ignore[method-assign]

    def ill() -> None:
        raise RuntimeError("the device is gone")

    house.serving.scheduler.run = ill  # type: ignore[method-assign]
    renewed: list[None] = []
    house.serving._replace_scheduler = lambda: renewed.append(None)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gone"):
        house.serving.run()
    assert len(renewed) == MAX_FAILURES


@pytest.mark.parametrize("verb", ["release_memory", "pause"])
async def test_no_step_is_planned_that_an_operator_holds(verb: str) -> None:
    """The scheduler that takes the place of another may get requests before intake knows it."""
    house = Harness(RuntimeError, Choosy(lambda: ValueError("x")))
    args = {"release_memory": {"tags": ["weights"]}, "pause": {"mode": "in_place"}}
    house.send(Control("c", verb, args[verb]))
    house.serving.scheduler.tick(wait=False)
    house.submit([8, POISON, 9])
    with pytest.raises(ValueError, match="x"):
        house.serving.scheduler.tick(wait=False)
    house.serving._replace_scheduler()
    house.submit([1, 2])
    scheduler = house.serving.scheduler
    scheduler._receive(0)
    assert house.num_made == 2 and len(scheduler.queue) == 1 and scheduler.is_held
