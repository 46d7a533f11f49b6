"""Ranks that follow rank 0: they compute the same steps, obey commands together, stop at a gap."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.executor.fake_model import FakeModel, make_runner

from radixlm.base.errors import InvalidRequest, InvariantError, RankLost
from radixlm.executor.runner import Runner
from radixlm.parallel.rank import RankLoop
from radixlm.parallel.relay import COMMAND, FINISH, PLAN, RENEW, STOP, Answer, Command, Relay
from radixlm.step.plan import Admission, DecodeBatch, Item, Items, NewPages, PageUpdate, StepPlan
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Wire:
    """Rank 0 as one follower sees it, and the follower as rank 0 does, in one thread."""

    limit_s = 60.0

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.calls: list[Future[list[Any]]] = []

    def tell(self, kind: int, data: bytes = b"") -> None:
        self.sent.append(bytes((kind,)) + data)

    def expect(self) -> tuple[int, Future[list[Any]]]:
        self.calls.append(Future())
        return len(self.calls) - 1, self.calls[-1]

    def read(self) -> bytes:
        return self.sent.pop(0) if self.sent else bytes((STOP,))

    def answer(self, answer: Answer) -> None:
        call = self.calls[answer.call]
        if answer.error:
            call.set_exception(InvalidRequest(answer.error))
        else:
            call.set_result([answer.data])


def pair(wire: Wire) -> tuple[Relay, FakeModel, RankLoop, list[FakeModel]]:
    """Rank 0 with its model, and rank 1 with the models that it has made."""
    runner, model = make_runner()
    made: list[FakeModel] = []

    def make() -> Runner:
        runner, theirs = make_runner()
        made.append(theirs)
        return runner

    return Relay(runner, wire), model, RankLoop(1, wire, make), made


def serve(relay: Relay, plan: StepPlan) -> list[int]:
    step = relay.forward(plan)
    relay.sample(step, {})
    return relay.read(step).tokens.tolist()


def plans() -> list[StepPlan]:
    """A prompt with log-probabilities in two chunks, then two decodes beside another prompt."""
    prompt = np.array([3, 4, 5, 6], np.int32)
    need = LogprobParams(prompt_from=0)
    pages = PageUpdate(0, 0, 0, np.array([1, 2], np.int32))
    whole = Admission("a", 0, GREEDY, prompt, prompt[:0])
    first = Item("a", 0, 0, 3, prompt[:3], False, need, 0, prompt[1:4])
    last = Item("a", 0, 3, 1, prompt[3:], True, need)
    decodes = DecodeBatch(("a",), np.array([0]))
    other = Item("b", 1, 0, 2, prompt[:2], True)
    more = NewPages(np.array([0]), np.array([2]), np.array([9], np.int32))
    return [
        StepPlan(0, Items.of((first,)), (whole,), pages=(pages,)),
        StepPlan(1, Items.of((last,))),
        StepPlan(2, Items(decodes, np.array([4])), new_pages=more),
        StepPlan(
            3,
            Items(decodes, np.array([5]), (other,)),
            (Admission("b", 1, GREEDY, prompt[:2], prompt[:0]),),
            pages=(PageUpdate(0, 1, 0, np.array([5], np.int32)),),
        ),
    ]


def test_a_rank_computes_what_rank_0_computes() -> None:
    wire = Wire()
    relay, model, loop, made = pair(wire)
    tokens = [serve(relay, plan) for plan in plans()]
    assert tokens == [[], [], [8], [9]]
    loop.run()
    (theirs,) = made
    assert theirs.rows == model.rows  # the head too, for log-probabilities of prompts
    assert len(theirs.batches) == len(model.batches) == 4
    for ours, same in zip(model.batches, theirs.batches, strict=True):
        for name in ("token_ids_T", "positions_T", "kv_len_S", "page_table_GSP", "store_GT"):
            pair_of = (getattr(ours, name), getattr(same, name))
            tensors = pair_of if isinstance(pair_of[0], tuple) else ((one,) for one in pair_of)
            assert all(map(torch.equal, *tensors)), name


def test_a_new_scheduler_finds_ranks_with_empty_tables() -> None:
    wire = Wire()
    relay, _, loop, made = pair(wire)
    for plan in plans()[:2]:
        serve(relay, plan)
    wire.tell(RENEW)
    again, _, _, _ = pair(wire)
    for plan in plans():
        serve(again, plan)
    loop.run()
    assert len(made) == 2 and len(made[1].batches) == 4


def test_a_gap_and_nonsense_stop_a_rank() -> None:
    wire = Wire()
    relay, _, loop, _ = pair(wire)
    for plan in plans()[:3]:
        serve(relay, plan)
    del wire.sent[1]
    with pytest.raises(InvariantError, match="rank 1: plan 2 follows plan 0"):
        loop.run()
    for nonsense in (b"?", bytes((PLAN,)) + b"\x01"):
        wire.sent = [nonsense]
        with pytest.raises(InvariantError):
            loop.run()


def test_an_exception_in_a_shared_step_loses_all_ranks() -> None:
    relay, model, _, _ = pair(Wire())
    model.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(RankLost, match="rank 0: TypeError"):
        relay.forward(plans()[0])


class Loads:
    """A command whose work a thread would do, as that of adapters is."""

    def __init__(self, runner: Runner, fails: bool = False) -> None:
        self.loaded: list[int] = []
        self.prepared: Future[Any] = Future()
        self._fails = fails
        runner._commands = {  # type: ignore[assignment]
            "load_lora_adapter": self.load,
            "unload_lora_adapter": lambda args: self.loaded.clear(),
            "stop_profile": lambda args: {"files": ["f"]},
        }

    def load(self, args: dict[str, Any]) -> Future[Any]:
        def publish() -> str:
            if self._fails:
                raise InvalidRequest("no such file")
            self.loaded.append(args["number"])
            return "loaded"

        self.prepared.set_result(publish)
        return self.prepared


@pytest.mark.parametrize("fails", [False, True])
def test_adapters_take_effect_on_all_ranks_or_on_none(fails: bool) -> None:
    wire = Wire()
    relay, _, loop, _ = pair(wire)
    ours, theirs = Loads(relay.runner), Loads(loop.runner, fails)
    tell = wire.tell

    def tell_now(kind: int, data: bytes = b"") -> None:
        tell(kind, data)
        loop.run()

    both = relay.control("load_lora_adapter", {"number": 4})
    assert not both.done()  # the other rank has not read it
    loop.run()
    assert both.done() and not ours.loaded and not theirs.loaded
    wire.tell = tell_now  # type: ignore[method-assign]
    if fails:
        with pytest.raises(InvalidRequest, match="no such file"):
            both.result()()
        assert ours.loaded == theirs.loaded == []
    else:
        assert both.result()() == "loaded"
        assert ours.loaded == theirs.loaded == [4]


def test_commands_of_one_rank_and_of_all() -> None:
    wire = Wire()
    relay, _, loop, _ = pair(wire)
    Loads(relay.runner), Loads(loop.runner)
    wire.tell = lambda kind, data=b"": (wire.sent.append(bytes((kind,)) + data), loop.run())  # type: ignore[method-assign,assignment,func-returns-value,return-value]
    assert relay.control("stop_profile", {}) == {"files": ["f", "f"]}
    with pytest.raises(InvalidRequest, match="knows no 'dance'"):
        relay.control("dance", {})
    assert not wire.sent
    wire.calls = [Future()]
    wire.sent = [bytes((COMMAND,)) + msgspec.msgpack.encode(Command(0, "dance", {}))]
    loop.run()
    with pytest.raises(InvalidRequest, match="knows no 'dance'"):
        wire.calls[0].result(0)


@pytest.mark.parametrize("verb", ["memory_usage", "load_lora_adapter"])
def test_a_rank_that_does_not_answer_is_lost(verb: str) -> None:
    wire = Wire()
    relay, _, loop, _ = pair(wire)
    ours = Loads(relay.runner)
    Loads(loop.runner)
    wire.limit_s = 0.01
    with pytest.raises(RankLost, match=f"has not answered '{verb}' within 0.01 s"):
        if verb == "memory_usage":
            relay.runner._commands[verb] = lambda args: {}
            relay.control(verb, {})
        else:
            both = relay.control(verb, {"number": 4})
            loop.run()
            both.result()()
    assert [message[0] for message in wire.sent] == (
        [COMMAND] if verb == "memory_usage" else [FINISH]
    )
    assert ours.loaded == ([] if verb == "memory_usage" else [4])
