"""Several intakes, one engine: each answer finds its way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixlm.engine.fan import FanChannel
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.replies import Beat, ControlReply, Finish, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

Ends = tuple[list[ZmqChannel], FanChannel]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    addresses = [f"ipc://{tmp_path}/{i}" for i in range(2)]
    intakes = [ZmqChannel(a, intake_codec(), bind=True) for a in addresses]
    fan = FanChannel([ZmqChannel(a, scheduler_codec(), bind=False) for a in addresses])
    fan.send(Beat(LoadReport()))  # a PAIR refuses to send before its peer is there
    for intake in intakes:
        assert len(intake.receive(30.0)) == 1
    yield intakes, fan
    fan.close()
    for intake in intakes:
        intake.close()


def _request(rid: str) -> TokenizedRequest:
    return TokenizedRequest(rid=rid, input_ids=pack_ids([1, 2]), sampling=SamplingParams())


def _receive(fan: FanChannel, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        got = fan.receive(30.0)
        assert got, "nothing came within 30 s"
        found += got
    return found


def test_deltas_go_to_their_intake(ends: Ends) -> None:
    intakes, fan = ends
    intakes[0].send(_request("a"))
    intakes[1].send(_request("b"))
    _receive(fan, 2)
    fan.send(StepReply([TokenDelta("a", [1]), TokenDelta("b", [2]), TokenDelta("nobody", [3])]))
    for intake, rid in zip(intakes, "ab", strict=True):
        (reply,) = intake.receive(30.0)
        assert [d.rid for d in reply.deltas] == [rid]


def test_an_id_in_use_is_refused_to_the_other(ends: Ends) -> None:
    intakes, fan = ends
    intakes[0].send(_request("same"))
    _receive(fan, 1)
    intakes[1].send(_request("same"))
    assert fan.receive(30.0) == []
    (reply,) = intakes[1].receive(30.0)
    assert reply.deltas[0].finish.status == 400
    fan.send(StepReply([TokenDelta("same", [7], Finish("length"))]))
    (reply,) = intakes[0].receive(30.0)
    assert reply.deltas[0].tokens == [7]


def test_abort_all_means_ones_own(ends: Ends) -> None:
    intakes, fan = ends
    intakes[0].send(_request("a"))
    intakes[1].send(_request("b"))
    _receive(fan, 2)
    intakes[1].send(AbortRequest(all=True))
    (abort,) = _receive(fan, 1)
    assert isinstance(abort, AbortRequest) and abort.rids == ("b",) and not abort.all


def test_answers_and_beats(ends: Ends) -> None:
    intakes, fan = ends
    intakes[1].send(Control("call", "ping"))
    _receive(fan, 1)
    fan.send(ControlReply("call", True))
    (reply,) = intakes[1].receive(30.0)
    assert reply.call_id == "call"
    fan.send(Beat(LoadReport()))
    for intake in intakes:
        (beat,) = intake.receive(30.0)
        assert isinstance(beat, Beat)
