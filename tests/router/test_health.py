"""Health: the states of a worker under checks, broken connections and failed requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from radixlm.router import health as module
from radixlm.router import registry
from radixlm.router.health import Health, Outcome
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.worker import State, Worker
from tests.router.fakes import Servers, joined, until

URL = "http://a:1"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class World:
    """One worker, its server, and a clock that the test moves."""

    def __init__(self, clock: Clock, **options: object) -> None:
        self.clock, self.servers = clock, Servers()
        self.servers.up(URL)
        self.registry = Registry(Options(**options), self.servers.fetch)  # type: ignore[arg-type]
        self.num_received = 0
        self.health = Health(self.registry, RouterMetrics(), lambda url: self.num_received)
        self.states: list[State] = []
        self.registry.on_move = lambda worker, state: self.states.append(state)
        self.worker = self.registry.add(Worker(URL))

    async def start(self) -> World:
        await joined(self.registry, self.worker)
        self.states.clear()
        return self

    def report(self, *outcomes: Outcome) -> State:
        for outcome in outcomes:
            self.health.reported(self.worker, outcome)
        return self.worker.state

    async def after(self, seconds: float) -> State:
        """The state after so many seconds, in steps of 0.1 s as the gateway's."""
        for _ in range(round(seconds * 10)):
            self.clock.now_s += 0.1
            self.health.tick()
            pulse = self.health._pulses.get(self.worker.id)
            await until(lambda pulse=pulse: pulse is None or not pulse.is_checking)
        return self.worker.state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(registry, "time", clock)
    random.seed(1)
    return clock


async def test_client_errors_and_overload_leave_the_breaker_closed(clock: Clock) -> None:
    world = await World(clock).start()
    assert world.report(*["client", "busy"] * 100) is State.READY
    assert world.report(*["error"] * 9, "ok", *["error"] * 9) is State.READY
    assert world.report("error") is State.SUSPECT


async def test_a_breaker_opens_half_opens_and_closes(clock: Clock) -> None:
    world = await World(clock, cb_failure_threshold=2, cb_success_threshold=2).start()
    assert world.report("error", "error") is State.SUSPECT
    assert await world.after(59) is State.SUSPECT and await world.after(2) is State.READY
    assert world.report("ok", "error") is State.SUSPECT  # half open: the first failure opens it
    assert await world.after(61) is State.READY
    assert world.report("ok", "ok", "error") is State.READY


async def test_failures_far_apart_do_not_add_up(clock: Clock) -> None:
    world = await World(clock, cb_failure_threshold=2, cb_window_duration_secs=10).start()
    world.report("error")
    await world.after(11)
    assert world.report("error") is State.READY
    assert world.report("error") is State.SUSPECT


async def test_a_breaker_can_be_switched_off(clock: Clock) -> None:
    world = await World(clock, disable_circuit_breaker=True).start()
    assert world.report(*["error"] * 1000) is State.READY


async def test_three_broken_connections_in_a_second_are_enough(clock: Clock) -> None:
    world = await World(clock).start()
    assert world.report("unreachable", "cut") is State.READY
    assert world.report("unreachable") is State.SUSPECT
    assert await world.after(0.9) is State.SUSPECT and await world.after(0.3) is State.READY


async def test_facts_are_asked_anew_when_a_worker_returns_and_now_and_then(clock: Clock) -> None:
    world = await World(clock).start()
    world.report(*["unreachable"] * 3)
    world.servers.up(URL, resume_digest="another")  # it was restarted within the second
    told: list[str] = []
    world.registry.listen(lambda event, worker: told.append(event))
    assert await world.after(1.2) is State.READY
    assert world.worker.facts["resume_digest"] == "another" and told == ["changed", "changed"]
    world.servers.up(URL, resume_digest="third", uptime=5)
    await world.after(61)
    assert world.worker.facts["resume_digest"] == "third"
    told.clear()
    world.servers.up(URL, resume_digest="third", uptime=6)
    await world.after(61)
    assert world.worker.facts["uptime"] == 6 and told == []
    for path in ("/server_info", "/model_info", "/v1/models"):
        world.servers.answers[URL, path] = 500
    await world.after(61)
    assert world.worker.facts["resume_digest"] == "third"


async def test_facts_are_asked_anew_after_a_broken_connection(clock: Clock) -> None:
    world = await World(clock).start()
    assert await world.after(0.5) is State.READY
    world.servers.up(URL, served_model_name="another")  # as quick as that
    assert world.report("cut") is State.READY and await world.after(0.1) is State.READY
    assert world.worker.model_id == "another"
    asked = len(world.servers.asked)
    await world.after(20)
    assert len(world.servers.asked) == asked


async def test_a_dead_process_is_found_after_one_broken_connection(clock: Clock) -> None:
    world = await World(clock).start()
    world.servers.down(URL)
    world.report("unreachable")
    assert await world.after(0.1) is State.SUSPECT
    assert await world.after(10) is State.UNHEALTHY
    asked = len(world.servers.asked)
    await world.after(100)
    assert 10 <= len(world.servers.asked) - asked <= 30  # the probes back off
    world.servers.up(URL, served_model_name="another")
    assert await world.after(13) is State.READY  # it was out for 110 s
    assert world.worker.facts["served_model_name"] == "another"  # asked anew
    assert world.states == [State.SUSPECT, State.UNHEALTHY, State.READY]


async def test_checks_find_a_server_that_fails_them(clock: Clock) -> None:
    world = await World(
        clock, health_check_interval_secs=2, health_failure_threshold=3, health_success_threshold=2
    ).start()
    world.servers.answers[URL, "/health"] = 503
    assert await world.after(4) is State.READY and await world.after(3) is State.UNHEALTHY
    world.servers.answers[URL, "/health"] = {}
    assert await world.after(1) is State.UNHEALTHY and await world.after(3.5) is State.READY


async def test_a_slow_check_after_a_broken_connection_is_no_death(clock: Clock) -> None:
    world = await World(clock).start()
    world.servers.answers[URL, "/health"] = TimeoutError()
    check = world.registry.check

    async def slow(worker: Worker) -> None:
        clock.now_s += 5
        await check(worker)

    world.registry.check = slow  # type: ignore[method-assign]
    world.report("unreachable")
    assert await world.after(0.2) is State.READY


def _hang(world: World) -> None:
    """The server takes connections and says nothing."""
    world.servers.answers[URL, "/health"] = TimeoutError()
    check = world.registry.check

    async def slow(worker: Worker) -> None:
        world.clock.now_s += 5
        await check(worker)

    world.registry.check = slow  # type: ignore[method-assign]


async def test_a_worker_that_hangs_amid_requests_is_out_within_a_minute(clock: Clock) -> None:
    world = await World(clock).start()
    world.worker.num_inflight = 1
    _hang(world)
    began_s, checked = clock.now_s, _num_checks(world)
    assert await world.after(9.8) is State.READY and _num_checks(world) == checked
    while world.worker.state is State.READY:
        await world.after(0.1)
    assert clock.now_s - began_s == pytest.approx(10 + 5 + 5 + 5 + 5 + 5, abs=1)


async def test_a_worker_that_sends_something_or_has_no_request_is_not_asked(clock: Clock) -> None:
    world = await World(clock, health_check_interval_secs=600).start()
    checked, world.worker.num_inflight = _num_checks(world), 1
    for _ in range(5):
        await world.after(5)
        world.num_received += 1
    world.worker.num_inflight = 0
    await world.after(3)
    assert _num_checks(world) == checked
    world.worker.num_inflight = 1  # a long prompt: silent, but well
    assert await world.after(21) is State.READY and _num_checks(world) == checked + 2


async def test_an_unhealthy_worker_may_be_removed(clock: Clock) -> None:
    world = await World(clock, health_check_interval_secs=1, remove_unhealthy_workers=True).start()
    world.servers.down(URL)
    assert await world.after(5) is State.GONE and len(world.registry) == 0


async def test_checks_may_be_off_and_draining_workers_have_none(clock: Clock) -> None:
    world = await World(clock, disable_health_check=True).start()
    world.servers.up(URL, resume_digest="another")
    checked = _num_checks(world)
    assert await world.after(31) is State.READY and _num_checks(world) == checked
    await until(lambda: world.worker.facts.get("resume_digest") == "another")
    world.servers.down(URL)
    assert await world.after(100) is State.READY and _num_checks(world) == checked
    world.registry.move(world.worker, State.DRAINING)
    assert world.report(*["unreachable"] * 5) is State.DRAINING
    asked = len(world.servers.asked)
    assert await world.after(10) is State.DRAINING and len(world.servers.asked) == asked


def _num_checks(world: World) -> int:
    return sum(path == "/health" for _, _, path, _ in world.servers.asked)


async def test_a_worker_drained_amid_a_good_check_stays_drained(clock: Clock) -> None:
    world = await World(clock).start()
    world.report(*["unreachable"] * 3)
    fetch = world.servers.fetch

    async def drained(url: str, method: str, target: str, **rest: Any) -> Any:
        if target == "/v1/models":  # asked after the check has passed
            world.registry.move(world.worker, State.DRAINING)
        return await fetch(url, method, target, **rest)

    world.registry.fetch = drained
    assert await world.after(1.2) is State.DRAINING
