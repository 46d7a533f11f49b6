"""Sessions: the ids that a request goes on from."""

from __future__ import annotations

import random
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest, TooManyRequests
from radixlm.continuation.sessions import Sessions
from radixlm.intake.identity import Identity, set_identity
from radixlm.intake.records import GenerateRequest
from radixlm.wire.replies import Finish
from radixlm.wire.sampling_params import SamplingParams


class Talk:
    """One open session without a tokenizer."""

    def __init__(self, streaming: bool = False) -> None:
        self.sessions = Sessions(None)
        self.sessions.open(1000, "s", streaming=streaming)

    def ask(self, rid: str, ids: list[int], /, **params: Any) -> list[int]:
        """The ids of the whole prompt."""
        session = {"id": "s", **params}
        request = GenerateRequest(SamplingParams(), input_ids=ids, rid=rid, session=session)
        self.sessions.extend(request)
        assert request.input_ids is not None
        return request.input_ids

    def end(self, rid: str, output_ids: list[int], finish: Finish | None = None) -> None:
        state: Any = SimpleNamespace(rid=rid, output_ids=output_ids)
        self.sessions.ended(state, finish or Finish("stop"))


@pytest.mark.parametrize(
    ("offset", "kept"),
    [(None, 5), (0, 5), (1, 1), (4, 4), (5, 5), (6, 5), (-1, 4), (-5, 0)],
)
def test_an_offset_cuts_what_came_before(offset: int | None, kept: int) -> None:
    """As a Python slice; at the length itself nothing is cut."""
    talk = Talk()
    assert talk.ask("a", [1, 2, 3]) == [1, 2, 3]
    talk.end("a", [4, 5])
    whole = talk.ask("b", [9], rid="a", offset=offset)
    assert whole == [*[1, 2, 3, 4, 5][:kept], 9]


def test_the_output_before_can_be_dropped() -> None:
    talk = Talk()
    talk.ask("a", [1, 2, 3])
    talk.end("a", [4, 5])
    assert talk.ask("b", [9], rid="a", drop_previous_output=True) == [1, 2, 3, 9]


def test_a_turn_that_failed_is_no_part_of_its_session() -> None:
    talk = Talk()
    talk.ask("a", [1, 2, 3])
    talk.end("a", [], Finish("error", message="x", status=500))
    with pytest.raises(InvalidRequest, match="no request 'a' in this session"):
        talk.ask("b", [9], rid="a")
    assert talk.ask("a", [1, 2]) == [1, 2], "its id is free again"
    with pytest.raises(InvalidRequest, match="'a' still runs"):
        talk.ask("b", [9], rid="a")


def test_a_turn_that_was_aborted_can_be_continued() -> None:
    talk = Talk()
    talk.ask("a", [1, 2])
    talk.end("a", [3], Finish("abort", message="x"))
    assert talk.ask("b", [9], rid="a") == [1, 2, 3, 9]


def test_a_streaming_session_goes_on_from_what_ended_well() -> None:
    talk = Talk(streaming=True)
    assert talk.ask("a", [1, 2]) == [1, 2]
    with pytest.raises(InvalidRequest, match="'a' still runs"):
        talk.ask("b", [9])
    talk.end("a", [3])
    assert talk.ask("b", [4], rid="no one") == [1, 2, 3, 4]
    talk.end("b", [5], Finish("abort"))
    with pytest.raises(InvalidRequest, match="offset: the session is streaming"):
        talk.ask("c", [9], offset=1)
    assert talk.ask("c", [6]) == [1, 2, 3, 6]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_capacity_counts_every_token_once(streaming: bool) -> None:
    talk = Talk(streaming)
    rid = None
    for turn in range(10):
        talk.ask(str(turn), [1] * 60, rid=rid)
        talk.end(rid := str(turn), [2] * 30)
    with pytest.raises(InvalidRequest, match="holds 900 tokens; 101 more exceed"):
        talk.ask("over", [1] * 101, rid=rid)
    assert len(talk.ask("fits", [1] * 100, rid=rid)) == 1000


def test_all_sessions_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle ones go, the oldest first; those that run stay."""
    monkeypatch.setattr("radixlm.continuation.sessions.MAX_TOKENS", 100)
    talk = Talk()
    for name in ("runs", "old", "new"):
        talk.sessions.open(0, name)
        talk.ask(name, [1] * 20, id=name)
        if name != "runs":
            talk.end(name, [2] * 10)
    with pytest.raises(TooManyRequests, match="may hold 100 tokens; these are 1 too many"):
        talk.ask("a", [1] * 81)
    assert talk.ask("a", [1] * 20) and not caplog.records
    assert len(talk.ask("b", [1] * 10, id="new", rid="new")) == 40
    assert [one.getMessage() for one in caplog.records] == [
        "forgot 1 idle sessions: all may hold 100 tokens"
    ]
    with pytest.raises(InvalidRequest, match="no session 'old'"):
        talk.ask("c", [1], id="old", rid="old")


def test_who_holds_most_loses_sessions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.continuation.sessions.MAX_TOKENS", 100)
    talk = Talk()
    for name, count in (("ann", 20), ("bob", 30), ("bob again", 30)):
        copy_context().run(_fill, talk, name, count)
    talk.ask("a", [1] * 40)
    with pytest.raises(InvalidRequest, match="no session 'bob'"):
        talk.ask("b", [1], id="bob", rid="bob")
    assert talk.ask("c", [1], id="ann", rid="ann") and talk.ask("d", [1], id="bob again")


def _fill(talk: Talk, name: str, count: int) -> None:
    set_identity(Identity(name.split()[0]))
    talk.sessions.open(0, name)
    talk.ask(name, [1] * count, id=name)
    talk.end(name, [])


def test_a_request_that_is_refused_changes_nothing() -> None:
    talk = Talk()
    talk.ask("a", [1])
    talk.end("a", [2])
    talk.ask("b", [3], rid="a")
    talk.end("b", [4])
    for rid, ids, params in (
        ("c", [0] * 2000, {"replace": True}),
        ("a", [5], {"rid": "a", "replace": True}),
        ("c", [0] * 2000, {"rid": "a", "replace": True}),
    ):
        with pytest.raises(InvalidRequest):
            talk.ask(rid, ids, **params)
    assert talk.ask("d", [9], rid="b") == [1, 2, 3, 4, 9]


def test_what_no_engine_got_is_forgotten_and_its_id_is_of_the_one_that_runs() -> None:
    talk = Talk()
    talk.ask("a", [1])
    talk.sessions.open(9, "t")

    def request(rid: str, session: str, ids: list[int]) -> GenerateRequest:
        return GenerateRequest(SamplingParams(), input_ids=ids, rid=rid, session={"id": session})

    new = [request("x", "t", [1]), request("a", "t", [2])]
    with pytest.raises(InvalidRequest, match="Duplicate"), talk.sessions.joined(new):
        raise AssertionError
    with (
        pytest.raises(InvalidRequest, match="capacity"),
        talk.sessions.joined([request("x", "t", [1] * 10)]),
    ):
        raise AssertionError
    with talk.sessions.joined([request("x", "t", [1] * 9)]):
        pass  # the client left before an engine had it
    with talk.sessions.joined([request("x", "t", [1] * 9)]):
        talk.end("x", [7])
    talk.end("a", [2])
    assert talk.ask("b", [9], rid="a") == [1, 2, 9]


def test_a_tree_of_turns_holds_each_token_once() -> None:
    """Prompts come from their turns, however they were cut; none is kept whole."""
    rng, talk = random.Random(3), Talk()
    talk.sessions.open(0, "tree")
    known: dict[str, tuple[list[int], list[int]]] = {}  # prompts and outputs
    num_tokens = 0
    for number in range(300):
        rid, ids = f"r{number}", [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        params: dict[str, Any] = {"id": "tree"}
        before: list[int] = []
        if known and rng.random() < 0.9:
            params["rid"] = rng.choice(list(known)[-20:])
            drops, offset = rng.random() < 0.3, rng.choice((0, 0, -2, 3, 40))
            prompt, output = known[params["rid"]]
            before = prompt if drops else prompt + output
            before = before[:offset] if offset else before
            params |= {"drop_previous_output": drops, "offset": offset}
        prompt = talk.ask(rid, ids, **params)
        assert prompt == before + ids
        output = [rng.randrange(9) for _ in range(rng.randrange(4))]
        talk.end(rid, output)
        known[rid], num_tokens = (prompt, output), num_tokens + len(ids + output)
    turns = talk.sessions._open["tree"].turns.values()
    assert sum(len(turn.tokens()) for turn in turns) == num_tokens
    assert sum(len(prompt) for prompt, _ in known.values()) > 2 * num_tokens
