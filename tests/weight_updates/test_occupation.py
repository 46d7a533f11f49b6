"""MemoryOccupation: what /sleep waits for, and commands that meet an engine which restarts."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.base.errors import Overloaded
from radixlm.weight_updates import occupation as occupations
from radixlm.weight_updates.occupation import MemoryOccupation
from radixlm.wire.replies import ControlReply


class FakeIntake:
    """An engine that answers, or dies over what ``deaths`` asks first and is ready again two turns
    of the event loop later; one request, which does not end."""

    def __init__(self, is_paused: bool = False, deaths: int = 0) -> None:
        self.requests, self.is_paused = ["r"], is_paused
        self.failure: Any = None
        self.engine = SimpleNamespace(load=SimpleNamespace(released=()))
        self.replicas: Any = SimpleNamespace(ready=[self.engine])
        self.asked: list[str] = []
        self.deaths = deaths

    async def control(self, verb: str, **_: Any) -> Any:
        return await self.ask(None, verb, {})

    def ask(self, _: Any, verb: str, args: dict[str, Any]) -> asyncio.Future[ControlReply]:
        self.asked.append(verb)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        if self.deaths:
            self.deaths -= 1
            self.replicas.ready = []
            future.set_exception(Overloaded("the engine restarts"))
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.replicas.ready.append, self.engine)
        else:
            future.set_result(ControlReply("x", True))
        return future


@pytest.mark.parametrize("released", [(), ("kv_cache",)])
async def test_sleep_does_not_wait_for_requests_that_are_held(released: tuple[str, ...]) -> None:
    """A pause holds them, or memory that is released."""
    intake = FakeIntake(is_paused=not released)
    occupation = MemoryOccupation(intake)
    occupation.released = released
    await asyncio.wait_for(occupation.sleep(1, "wait"), 10)
    assert occupation.is_open.is_set()
    began = ["pause", "release_memory"]
    assert intake.asked == ([*began, "continue"] if released else began)


_CALLS: dict[str, Callable[[MemoryOccupation], Awaitable[Any]]] = {
    "pause": lambda one: one.pause("in_place"),
    "continue": MemoryOccupation.go_on,
    "release_memory": MemoryOccupation.release,
    "resume_memory": MemoryOccupation.resume,
}


@pytest.mark.parametrize("verb", _CALLS)
async def test_what_meets_a_dying_engine_is_asked_of_the_next(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A /continue_generation that is lost would stop all requests for good."""
    monkeypatch.setattr(occupations, "IDLE_POLL_S", 0)
    intake = FakeIntake(is_paused=verb == "continue", deaths=2)
    occupation = MemoryOccupation(intake)
    await asyncio.wait_for(_CALLS[verb](occupation), 10)
    assert intake.asked == [verb] * 3
    assert intake.is_paused == (verb == "pause")
    assert bool(occupation.released) == (verb == "release_memory")


async def test_without_another_engine_the_command_is_refused() -> None:
    intake = FakeIntake(deaths=1)
    intake.failure = Overloaded("gone")
    with pytest.raises(Overloaded):
        await asyncio.wait_for(MemoryOccupation(intake).pause("abort"), 10)
    assert intake.asked == ["pause"] and not intake.is_paused
