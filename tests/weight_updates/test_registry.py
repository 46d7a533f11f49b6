"""WeightsRegistry with engines that are scripted: what comes in between the phases of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import save_file
from torch import ones

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.weight_updates import occupation as occupations
from radixlm.weight_updates.occupation import MemoryOccupation
from radixlm.weight_updates.registry import WeightsOptions, WeightsRegistry, WeightsUpdate
from radixlm.wire.replies import ControlReply, LoadReport


class Intake:
    """``answer`` gives each engine's answer to a command; ``asked`` are its number and verb."""

    def __init__(self, num_engines: int = 2) -> None:
        self.replicas = SimpleNamespace(ready=[self.engine(i) for i in range(num_engines)])
        self.requests: dict[str, Any] = {}
        self.is_paused, self.failure = False, None
        self.asked: list[tuple[int, str]] = []
        self.answer: Callable[[int, str], ControlReply] = self.agree
        self.occupation = MemoryOccupation(cast(Any, self))
        self.weights = WeightsRegistry(cast(Any, self), WeightsOptions(folder="/old"))

    def engine(self, index: int) -> Any:
        return SimpleNamespace(index=index, facts={}, is_ready=True, load=LoadReport())

    def agree(self, index: int, verb: str) -> ControlReply:
        return ControlReply("", True, data={"digest": "d", "num_paused": 0})

    def ask(self, replica: Any, verb: str, args: Any) -> asyncio.Future[ControlReply]:
        self.asked.append((replica.index, verb))
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self.answer(replica.index, verb))
        except Overloaded as error:
            future.set_exception(error)
        return future

    async def control(self, verb: str, **args: Any) -> ControlReply:
        self.asked.append((-1, verb))
        return ControlReply("", True)


@pytest.mark.parametrize("number", [1, 5])
async def test_an_engine_that_begins_meanwhile_serves_nothing_else(number: int) -> None:
    """All engines read again, but not for ever."""
    intake, begun = Intake(1), [1]

    def answer(index: int, verb: str) -> ControlReply:
        if (index, verb) == (0, "prepare_weights") and len(begun) <= number:
            intake.replicas.ready.append(intake.engine(len(begun)))  # with the old weights
            begun.append(1)
        return intake.agree(index, verb)

    intake.answer = answer
    outcome = await intake.weights.update(WeightsUpdate("/new"))
    asked = [(0, "prepare_weights"), (0, "drop_weights"), (0, "prepare_weights")]
    if number == 1:
        published = [(0, "publish_weights"), (1, "publish_weights")]
        assert outcome.is_ok and intake.asked == [*asked, (1, "prepare_weights"), *published]
    else:
        assert not outcome.is_ok and "update again" in outcome.message
        assert outcome.retry_after_s  # another try may succeed
        assert intake.weights.source is None and intake.asked[:3] == asked
        assert intake.asked.count((0, "prepare_weights")) == 3


@pytest.mark.parametrize("when", ["before", "prepare_weights", "quiesce", "for good"])
async def test_an_engine_that_dies_is_waited_for(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has the old weights: it reads the new ones before they hold."""
    intake, deaths = Intake(1), [when]
    monkeypatch.setattr(occupations, "IDLE_POLL_S", 0)

    def die() -> None:
        deaths.clear()
        intake.replicas.ready = []
        if when == "for good":
            intake.failure = Overloaded("gone")
        else:
            asyncio.get_running_loop().call_later(0, intake.replicas.ready.append, intake.engine(1))

    def answer(index: int, verb: str) -> ControlReply:
        if deaths and verb == "prepare_weights":
            die()
            if when != "quiesce":
                raise Overloaded("the engine restarts", retry_after_s=2.0)
        return intake.agree(index, verb)

    intake.answer = answer
    if when == "before":
        die()
    outcome = await asyncio.wait_for(intake.weights.update(WeightsUpdate("/new")), 10)
    if when == "for good":
        assert not outcome.is_ok and outcome.retry_after_s and intake.weights.source is None
        return
    old = ["prepare_weights", "drop_weights"]
    first = [] if when == "before" else [(0, verb) for verb in old]
    assert outcome.is_ok and intake.weights.source is not None
    assert intake.asked == [*first, (1, "prepare_weights"), (1, "publish_weights")]


async def test_an_exchange_that_fails_is_told(tmp_path: Path) -> None:
    """The tensors stay, as engines that start read them."""
    intake = Intake()

    def answer(index: int, verb: str) -> ControlReply:
        if (index, verb) == (1, "publish_weights"):
            return ControlReply("", False, "a fault")
        return intake.agree(index, verb)

    intake.answer = answer
    save_file({"x": ones(2)}, tmp_path / "x.safetensors")
    outcome = await intake.weights.update(WeightsUpdate(str(tmp_path), is_partial=True))
    assert not outcome.is_ok and "a fault; update again" in outcome.message
    source = intake.weights.source
    assert source is not None and list(Path(source.deltas[0]).glob("*.safetensors"))


async def test_a_release_that_one_engine_refuses_is_undone() -> None:
    intake = Intake()

    def answer(index: int, verb: str) -> ControlReply:
        return ControlReply("", (index, verb) != (1, "release_memory"), "requests run")

    intake.answer = answer
    with pytest.raises(InvalidRequest, match="requests run"):
        await intake.occupation.release(["weights"])
    assert intake.asked[2:] == [(0, "resume_memory"), (1, "resume_memory")]
    assert intake.occupation.released == ()


async def test_an_old_heartbeat_changes_nothing() -> None:
    """Of two engines that have resumed one speaks first."""
    intake = Intake()
    await intake.occupation.release(["weights"])
    for replica in intake.replicas.ready:
        replica.load = LoadReport(released=("weights",))
    await intake.occupation.resume()
    intake.replicas.ready[0].load = LoadReport()
    intake.occupation.note()
    assert intake.occupation.released == ()


async def test_a_sleep_does_not_wait_for_requests_that_are_held() -> None:
    intake = Intake()
    intake.requests["a"], intake.is_paused = object(), True
    await asyncio.wait_for(intake.occupation.sleep(0, "wait"), 10)
    assert intake.occupation.is_open.is_set()
