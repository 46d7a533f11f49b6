"""MemoryOccupation: what /sleep waits for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.base.errors import Overloaded
from radixlm.weight_updates.occupation import MemoryOccupation


class FakeIntake:
    """Without engines; one request, which does not end."""

    def __init__(self, is_paused: bool) -> None:
        self.requests, self.is_paused = ["r"], is_paused
        self.replicas: Any = SimpleNamespace(ready=[])
        self.asked: list[str] = []

    async def control(self, verb: str, **_: Any) -> Any:
        self.asked.append(verb)
        return SimpleNamespace(ok=True)

    def ask(self, *_: Any) -> Any:
        raise AssertionError("there is no engine")


@pytest.mark.parametrize("released", [(), ("kv_cache",)])
async def test_sleep_does_not_wait_for_requests_that_are_held(released: tuple[str, ...]) -> None:
    """A pause holds them, or memory that is released."""
    intake = FakeIntake(is_paused=not released)
    occupation = MemoryOccupation(intake)
    occupation.released = released
    with pytest.raises(Overloaded):
        await asyncio.wait_for(occupation.sleep(1, "wait"), 10)
    assert occupation.is_open.is_set()
    assert intake.asked == (["pause", "continue"] if released else ["pause"])
