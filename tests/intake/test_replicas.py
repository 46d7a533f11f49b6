"""Several engines behind one intake: who computes which request, and who takes over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.engine.intake import ServerIntake
from radixlm.entrypoints.http.admin.metrics import MetricsObserver
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.identity import Identity, set_identity
from radixlm.intake.observer import Observer
from radixlm.intake.records import GenerateRequest
from radixlm.observe.metrics import Buckets, Metrics
from radixlm.wire.replies import (
    ControlReply,
    DraftTotals,
    Failed,
    Finish,
    Heartbeat,
    LoadReport,
    Ready,
    StepReply,
    TokenDelta,
)
from radixlm.wire.sampling_params import SamplingParams
from tests.intake.scripted_engine import ScriptedLink

FACTS = {"max_total_num_tokens": 4096, "context_len": 64}


class Losses(Observer):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def engine_lost(self, reason: str) -> None:
        self.reasons.append(reason)


class Two:
    """An intake with two scripted engines."""

    def __init__(self, method: str = "round_robin", is_ready: bool = True) -> None:
        self.links = (ScriptedLink(), ScriptedLink())
        self.losses = Losses()
        facts = IntakeFacts(vocab=1000, context_len=64)
        self.intake = ServerIntake(None, facts, self.links, (self.losses,), method)
        self.intake.start()
        for link in self.links if is_ready else ():
            link.say(Ready(FACTS))

    def ask(self, rid: str, replica: int | None = None, num_tokens: int = 2) -> Any:
        sampling = SamplingParams(max_new_tokens=16)
        request = GenerateRequest(
            sampling, input_ids=[*range(5, 5 + num_tokens)], rid=rid, replica=replica
        )
        return self.intake.submit(request)[0]

    def reply(self, index: int, rid: str, tokens: list[int], finish: Finish | None = None) -> None:
        self.links[index].say(StepReply([TokenDelta(rid=rid, tokens=tokens, finish=finish)]))

    def rids(self, index: int) -> list[str]:
        return [request.rid for request in self.links[index].requests]


async def test_round_robin_takes_turns_and_skips_the_dead() -> None:
    two = Two()
    for rid in "abcd":
        two.ask(rid)
    assert (two.rids(0), two.rids(1)) == (["a", "c"], ["b", "d"])
    two.intake.lose_engine(None, 1)
    assert two.rids(0) == ["a", "c", "b", "d"]
    two.ask("e")
    assert two.rids(0)[-1] == "e" and two.intake.ready.is_set()
    two.links[1].say(Ready(FACTS))
    assert two.rids(1) == ["b", "d"], "what another computes stays there"


async def test_a_request_goes_to_the_replica_it_names_if_that_runs() -> None:
    two = Two()
    for rid, replica in (("a", 1), ("b", 1), ("c", None), ("d", 0)):
        two.ask(rid, replica)
    assert (two.rids(0), two.rids(1)) == (["c", "d"], ["a", "b"])
    two.intake.lose_engine(None, 1)
    two.ask("e", 1)
    assert two.rids(0) == ["c", "d", "a", "b", "e"]
    for replica in (2, -1, 1 << 40):
        with pytest.raises(InvalidRequest, match="0 to 1") as caught:
            two.ask("f", replica)
        assert caught.value.param == "data_parallel_rank"


async def test_shortest_queue_counts_own_requests_at_once_and_others_by_report() -> None:
    two = Two("shortest_queue")
    for rid in "abc":
        two.ask(rid)
    assert (two.rids(0), two.rids(1)) == (["a", "c"], ["b"])
    two.reply(0, "a", [1], Finish("length"))
    two.reply(0, "c", [1], Finish("length"))
    two.ask("d")
    assert two.rids(0)[-1] == "d"
    two.links[0].say(Heartbeat(LoadReport(num_running=5)))  # of another HTTP process
    two.ask("e")
    assert two.rids(1)[-1] == "e"


async def test_minimum_tokens_counts_prompts_at_once_and_growth_by_report() -> None:
    two = Two("minimum_tokens")
    for rid, num_tokens in (("a", 30), ("b", 8), ("c", 9), ("d", 20)):
        two.ask(rid, num_tokens=num_tokens)
    assert (two.rids(0), two.rids(1)) == (["a"], ["b", "c", "d"])
    two.reply(1, "d", [1], Finish("length"))
    two.ask("e")
    assert two.rids(1)[-1] == "e"
    two.links[1].say(Heartbeat(LoadReport(num_used_tokens=31)))  # answers have grown
    two.ask("f")
    assert two.rids(0)[-1] == "f"
    two.intake.lose_engine(None, 0)
    assert two.rids(1)[-2:] == ["a", "f"]


async def test_a_stream_continues_elsewhere_and_late_messages_are_ignored() -> None:
    two = Two()
    state = two.ask("a")
    two.reply(0, "a", [7, 8])
    two.intake.lose_engine(None, 0)
    moved = two.links[1].requests[-1]
    assert moved.ids().tolist() == [5, 6, 7, 8] and moved.num_emitted == 2 and moved.is_quarantined
    two.reply(0, "a", [9])  # a late message of the dead engine; token 9 comes again from the other
    two.reply(1, "a", [9, 10], Finish("length"))
    assert (await state.next()).token_ids == [7, 8, 9, 10]
    assert two.losses.reasons == ["the engine died"]


async def test_deaths_and_held_requests_are_counted() -> None:
    two, metrics = Two(), Metrics({"model_name": "m"}, Buckets())
    two.intake.observers = (MetricsObserver(metrics, is_first=True),)
    two.ask("a"), two.ask("b")
    two.intake.lose_engine(None, 0)
    assert two.intake.num_held == 0, "the other engine has both"
    two.intake.lose_engine(None, 1)
    two.intake.lose_engine(None, 1)  # it had not served again
    assert two.intake.num_held == 2
    assert b'radixlm:engine_deaths_total{model_name="m"} 2.0' in metrics.exposition({})
    two.links[0].say(Ready(FACTS))
    assert two.intake.num_held == 0
    two.links[1].say(Heartbeat(LoadReport(), num_orphans=3))
    assert b'num_aborted_requests_total{model_name="m"} 3.0' in metrics.exposition({})


async def test_the_first_replica_to_restart_gets_all_requests() -> None:
    two = Two()
    two.ask("a"), two.ask("b")
    two.intake.lose_engine(None, 0)
    two.intake.lose_engine(None, 1)
    assert not two.intake.ready.is_set()
    two.ask("c")
    with pytest.raises(Overloaded):
        await two.intake.control("info")
    two.links[1].say(Ready(FACTS))
    assert two.intake.ready.is_set() and sorted(two.rids(1)[-3:]) == ["a", "b", "c"]


async def test_aborts_go_to_the_one_that_has_it() -> None:
    two = Two()
    two.ask("a"), two.ask("b"), two.ask("c")
    two.intake.abort("b")
    assert [a.rids for a in two.links[1].aborts] == [("b",)] and not two.links[0].aborts
    two.intake.abort_all()
    for link in two.links:  # requests of other HTTP processes are there too
        assert (link.aborts[-1].all, link.aborts[-1].owner) == (True, None)
    set_identity(Identity("bob", is_admin=False))
    two.intake.abort_all("enough")
    last = two.links[0].aborts[-1]
    assert (last.all, last.owner, last.message) == (True, "bob", "enough")


async def test_controls_go_to_every_replica_and_refusals_count() -> None:
    two = Two()
    call = asyncio.create_task(two.intake.control("flush_cache"))
    await asyncio.sleep(0)
    for link, is_ok in zip(two.links, (True, False), strict=True):
        link.say(ControlReply(link.controls[-1].call_id, is_ok, f"ok {is_ok}"))
    assert (await call).message == "ok False"
    call = asyncio.create_task(two.intake.control("info"))
    await asyncio.sleep(0)
    two.links[0].say(ControlReply(two.links[0].controls[-1].call_id, True, data=1))
    two.intake.lose_engine(None, 1)
    with pytest.raises(Overloaded):
        await call


async def test_an_answered_call_outlives_its_replica() -> None:
    two = Two()
    call = asyncio.create_task(two.intake.control("info"))
    await asyncio.sleep(0)
    two.links[0].say(ControlReply(two.links[0].controls[-1].call_id, True, data=1))
    two.intake.lose_engine(None, 0)
    two.links[1].say(ControlReply(two.links[1].controls[-1].call_id, True, data=2))
    assert (await call).data == 1


async def test_the_load_is_that_of_all() -> None:
    two = Two()
    for link, count in zip(two.links, (2, 3), strict=True):
        link.say(Heartbeat(LoadReport(num_running=count, cache_hit_rate=0.5, num_total_tokens=10)))
    load = two.intake.load
    assert (load.num_running, load.cache_hit_rate, load.num_total_tokens) == (5, 0.5, 20)
    two.intake.lose_engine(None, 0)
    assert (two.intake.load.num_running, two.intake.load.cache_hit_rate) == (3, 0.5)
    two.intake.lose_engine(None, 1)
    assert (two.intake.load.num_running, two.intake.load.cache_hit_rate) == (0, 0)


async def test_figures_of_tiers_are_added() -> None:
    two = Two()
    for link, tokens in zip(two.links, (32, 16), strict=True):
        link.say(Heartbeat(LoadReport(tiers={"kept_tokens": tokens}, forward_s={"mixed": 0.5})))
    assert two.intake.load.tiers == {"kept_tokens": 48}
    assert two.intake.load.forward_s == {"mixed": 1.0}


async def test_drafts_of_all_are_counted_together() -> None:
    two = Two()
    two.links[0].say(Heartbeat(LoadReport()))
    assert two.intake.load.drafts is None
    for link, rounds in zip(two.links, (3, 5), strict=True):
        totals = DraftTotals(num_rounds=rounds, num_drafted=9, num_accepted=4)
        link.say(Heartbeat(LoadReport(spec_accept_length=rounds / 2, drafts=totals)))
    load = two.intake.load
    assert load.drafts == DraftTotals(num_rounds=8, num_drafted=18, num_accepted=8)
    assert load.spec_accept_length == 2.0


async def test_one_replica_may_be_lost_but_not_at_the_start() -> None:
    two = Two()
    state = two.ask("a")
    two.intake.lose_engine(None, 0)
    two.intake.give_up(Failed("EngineError", "died too often"), 0)
    assert two.intake.failure is None and not state.ended
    two.intake.lose_engine(None, 1)
    two.intake.give_up(Failed("EngineError", "died too often"), 1)
    assert two.intake.failure is not None and state.ended
    two = Two(is_ready=False)
    two.links[0].say(Failed("ConfigError", "--page-size 3: no"))
    assert two.intake.failure is not None


async def test_crashes_of_a_poison_request_count_on_every_replica() -> None:
    two = Two()
    bad, good = two.ask("bad"), two.ask("good")
    two.intake.lose_engine("bad", 0)
    assert not bad.ended and two.rids(1) == ["good", "bad"]
    two.intake.lose_engine("bad", 1)
    assert bad.ended and not good.ended


async def test_an_engine_that_lost_its_state_announces_itself_again() -> None:
    """Its process states: what it held is sent again, and what it computed alone is to blame."""
    two = Two()
    state = two.ask("a")
    two.reply(0, "a", [7])
    two.links[0].say(Ready(FACTS | {"poison_rid": "a"}))
    assert state.is_quarantined and state.crash_count == 1
    assert two.links[1].requests[-1].ids().tolist() == [5, 6, 7]


async def test_an_old_heartbeat_does_not_undo_the_end_of_a_pause() -> None:
    two = Two()
    for link in two.links:
        link.say(Heartbeat(LoadReport(is_paused=True)))
    two.intake.is_paused = False  # both have answered /continue_generation
    two.links[0].say(Heartbeat(LoadReport(is_paused=False)))
    assert not two.intake.is_paused
