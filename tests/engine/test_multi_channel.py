"""Several intakes and one engine: each answer reaches its intake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixlm.engine.multi_channel import MultiChannel
from radixlm.observe.log_tail import LogTail
from radixlm.wire import codec as codec_module
from radixlm.wire.channel import ZmqChannel
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.replies import ControlReply, Finish, Heartbeat, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import (
    AbortRequest,
    Control,
    LogprobParams,
    TokenizedRequest,
    pack_ids,
)
from radixlm.wire.sampling_params import SamplingParams

Ends = tuple[list[ZmqChannel], MultiChannel]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    addresses = [f"ipc://{tmp_path}/{i}" for i in range(2)]
    intakes = [ZmqChannel(a, intake_codec(), bind=True) for a in addresses]
    fan = MultiChannel([ZmqChannel(a, scheduler_codec(), bind=False) for a in addresses])
    fan.send(Heartbeat(LoadReport()))  # a PAIR socket refuses to send before its peer connects
    for intake in intakes:
        assert len(intake.receive(30.0)) == 1
    yield intakes, fan
    fan.close()
    for intake in intakes:
        intake.close()


def _request(rid: str) -> TokenizedRequest:
    return TokenizedRequest(rid=rid, input_ids=pack_ids([1, 2]), sampling=SamplingParams())


def _receive(fan: MultiChannel, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        dropped = fan.num_dropped
        got = fan.receive(30.0)
        # a wake-up may find dropped messages only; the others come with the next one
        assert got or fan.num_dropped > dropped, "nothing came within 30 s"
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
    ones = StepReply([TokenDelta("b", [6])], rids=("nobody", "b", "a"), tokens=(3, 4, 5))
    fan.send(ones)
    told = [intake.receive(30.0)[0] for intake in intakes]
    assert [(r.rids, r.tokens, len(r.deltas)) for r in told] == [(["a"], [5], 0), (["b"], [4], 1)]


def test_moments_and_log_lines_find_their_intakes(ends: Ends) -> None:
    intakes, fan = ends
    intakes[0].send(_request("a"))
    intakes[1].send(_request("b"))
    _receive(fan, 2)
    moments = [(rid, "prefill", 1.5, 0.0, 4, 0) for rid in ("a", "nobody", "b", "a")]
    fan.send(StepReply([TokenDelta("a", [7], Finish("length"))], moments=moments))
    told = [intake.receive(30.0)[0] for intake in intakes]
    assert [[moment[0] for moment in reply.moments] for reply in told] == [["a", "a"], ["b"]]
    assert tuple(told[1].moments[0]) == moments[2]
    fan.log_tail = LogTail("engine")
    fan.log_tail.extend([(1.0, "INFO", "engine", "a line")])
    for _ in range(2):
        fan.send(Heartbeat(LoadReport()))
    for intake in intakes:
        beats: list[Heartbeat] = []
        while len(beats) < 2:
            beats += intake.receive(30.0)
        assert [[tuple(line) for line in beat.lines] for beat in beats] == [
            [(1.0, "INFO", "engine", "a line")],
            [],
        ]


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


def test_abort_all_reaches_the_requests_of_all(ends: Ends) -> None:
    intakes, fan = ends
    intakes[0].send(_request("a"))
    intakes[1].send(_request("b"))
    _receive(fan, 2)
    intakes[1].send(AbortRequest(all=True, owner="o"))
    (abort,) = _receive(fan, 1)
    assert isinstance(abort, AbortRequest) and abort.all and abort.owner == "o"
    fan.send(StepReply([TokenDelta("a", finish=Finish("abort"))]))
    (reply,) = intakes[0].receive(30.0)
    assert reply.deltas[0].rid == "a"


def test_ids_of_a_dead_intake_can_be_used_again(ends: Ends) -> None:
    """Its successor ends what it had asked for; no answer will come."""
    intakes, fan = ends
    intakes[0].send(_request("same"))
    intakes[0].send(AbortRequest(all=True, quiet=True))
    _, abort = _receive(fan, 2)
    assert isinstance(abort, AbortRequest) and abort.rids == ("same",) and abort.quiet
    intakes[1].send(_request("same"))
    (again,) = _receive(fan, 1)
    assert isinstance(again, TokenizedRequest) and again.rid == "same"


def test_what_a_dead_intake_has_asked_ends_before_it_is_replaced(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    intakes, fan = ends
    intakes[0].send(_request("a"))
    intakes[1].send(_request("b"))
    _receive(fan, 2)
    intakes[0].close()
    (abort,) = _receive(fan, 1)
    assert isinstance(abort, AbortRequest) and abort.rids == ("a",) and not abort.all
    assert "HTTP process 0 has gone: its 1 requests are aborted" in caplog.text
    fan.send(StepReply([TokenDelta("a", finish=Finish("abort")), TokenDelta("b", [3])]))
    (reply,) = intakes[1].receive(30.0)
    assert [delta.rid for delta in reply.deltas] == ["b"]
    intakes[1].send(_request("a"))  # the client has asked again, and come to another
    (again,) = _receive(fan, 1)
    assert isinstance(again, TokenizedRequest) and again.rid == "a"


def test_the_successor_of_a_dead_intake_is_told_once_how_many_were_aborted(
    ends: Ends, tmp_path: Path
) -> None:
    intakes, fan = ends
    for rid in "ab":
        intakes[0].send(_request(rid))
    _receive(fan, 2)
    intakes[0].close()
    _receive(fan, 1)
    fan.send(StepReply([TokenDelta("a", finish=Finish("abort"))]))  # "b" still ends
    intakes[0] = ZmqChannel(f"ipc://{tmp_path}/0", intake_codec(), bind=True)
    while not intakes[0].receive(0.02):  # until the engine has connected again
        fan.send(Heartbeat(LoadReport()))
    intakes[0].send(AbortRequest(all=True, quiet=True))
    _receive(fan, 1)
    for _ in range(2):
        fan.send(Heartbeat(LoadReport(num_running=7)))
    for intake, told in zip(intakes, ([2, 0], [0, 0]), strict=True):
        beats: list[Heartbeat] = []
        while [beat.load.num_running for beat in beats[-2:]] != [7, 7]:
            beats += [one for one in intake.receive(30.0) if isinstance(one, Heartbeat)]
        assert [beat.num_orphans for beat in beats[-2:]] == told


def test_answers_and_beats(ends: Ends) -> None:
    intakes, fan = ends
    intakes[1].send(Control("call", "ping"))
    _receive(fan, 1)
    fan.send(ControlReply("call", True))
    (reply,) = intakes[1].receive(30.0)
    assert reply.call_id == "call"
    fan.send(Heartbeat(LoadReport()))
    for intake in intakes:
        (beat,) = intake.receive(30.0)
        assert isinstance(beat, Heartbeat)


def test_nonsense_is_answered_and_dropped(ends: Ends) -> None:
    intakes, fan = ends
    fan.vocab, fan.embed_dim = 10, 4
    bad = {
        "ids": TokenizedRequest("ids", pack_ids([1, 10]), SamplingParams()),
        "negative": TokenizedRequest("negative", pack_ids([-1]), SamplingParams()),
        "heat": TokenizedRequest("heat", pack_ids([1]), SamplingParams(temperature=float("nan"))),
        "top": TokenizedRequest(
            "top", pack_ids([1]), SamplingParams(), logprobs=LogprobParams(0, 99)
        ),
        "asked": TokenizedRequest(
            "asked", pack_ids([1]), SamplingParams(), logprobs=LogprobParams(0, 0, (77,))
        ),
        "rows": TokenizedRequest("rows", pack_ids([0, 0]), SamplingParams(), embeds=b"\0" * 16),
    }
    for message in bad.values():
        intakes[0].send(message)
    # a stop id beyond the vocabulary matches nothing
    stop = SamplingParams(stop_token_ids=(10,))
    intakes[0].send(TokenizedRequest("good", pack_ids([1]), stop))
    (good,) = _receive(fan, 1)
    assert isinstance(good, TokenizedRequest) and good.rid == "good"
    assert good.sampling.stop_token_ids == (10,)
    assert fan.num_dropped == len(bad)
    found: dict[str, int] = {}
    while len(found) < len(bad):
        replies = intakes[0].receive(30.0)
        assert replies, "no answer came"
        for reply in replies:
            found |= {d.rid: d.finish.status for d in reply.deltas if d.finish}
    assert found == dict.fromkeys(bad, 500)
    fan.send(Heartbeat(LoadReport()))
    (beat,) = intakes[1].receive(30.0)
    assert beat.load.num_dropped == len(bad)


def test_a_message_that_cannot_be_decoded_is_answered(ends: Ends) -> None:
    """A limit on a field refuses the message before its checks are reached."""
    intakes, fan = ends
    heat = TokenizedRequest("heat", pack_ids([1]), SamplingParams(temperature=float("nan")))
    intakes[1].send(heat)
    intakes[1].send(Control("call", 7))  # type: ignore[arg-type]
    intakes[1].send(Control("", 7))  # type: ignore[arg-type]  # nobody waits for it
    intakes[1].send(_request("good"))
    (good,) = _receive(fan, 1)
    assert isinstance(good, TokenizedRequest) and good.rid == "good"
    assert fan.num_dropped == 3
    replies: list[object] = []
    while len(replies) < 2:
        got = intakes[1].receive(30.0)
        assert got, "no answer came"
        replies += got
    refused, answer = replies
    assert isinstance(refused, StepReply) and refused.deltas[0].rid == "heat"
    assert refused.deltas[0].finish is not None and refused.deltas[0].finish.status == 500
    assert "temperature" in refused.deltas[0].finish.message
    assert isinstance(answer, ControlReply) and answer.call_id == "call" and not answer.ok


def test_a_message_over_the_limit_is_answered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    intakes, fan = ends
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 1000)
    intakes[0].send(TokenizedRequest("long", pack_ids([0] * 1000), SamplingParams()))
    intakes[0].send(_request("good"))
    _receive(fan, 1)
    (reply,) = intakes[0].receive(30.0)
    assert reply.deltas[0].rid == "long" and "limit 1000" in reply.deltas[0].finish.message


def test_large_hidden_states_come_in_several_messages(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    intake = ZmqChannel(address, intake_codec(), bind=True)
    channel = ZmqChannel(address, scheduler_codec(), bind=False)
    fan = MultiChannel([channel], max_bytes=4000)
    fan.send(Heartbeat(LoadReport()))
    assert len(intake.receive(30.0)) == 1
    parts = [bytes([i]) * 900 for i in range(5)] + [b"x" * 5000]
    whole = TokenDelta("a", [1, 2], Finish("length"), 7, hidden_states=parts)
    fan.send(StepReply([TokenDelta("b", [9]), whole, TokenDelta("c", [8])]))
    deltas: list[TokenDelta] = []
    while not any(d.rid == "c" for d in deltas):
        for reply in intake.receive(30.0):
            size = sum(len(h) for d in reply.deltas for h in d.hidden_states or ())
            assert size <= 2000, "half of the message is kept for the rest"
            deltas += reply.deltas
    mine = [d for d in deltas if d.rid == "a"]
    assert len(mine) > 4
    assert b"".join(h for d in mine for h in d.hidden_states or ()) == b"".join(parts)
    assert [d.tokens for d in mine[:-1]] == [[]] * (len(mine) - 1)
    assert (mine[-1].tokens, mine[-1].finish) == ([1, 2], Finish("length"))
    fan.close()
    intake.close()
