"""Engines die; requests continue."""

from __future__ import annotations

import asyncio

import pytest

from radixlm.base.errors import Overloaded
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Failed, Finish, Heartbeat, LoadReport, Ready
from tests.intake.scripted_engine import IntakeHarness

LENGTH = Finish("length")


async def test_requests_wait_for_the_first_engine(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, is_ready=False)
    stage.intake.submit(stage.ask("a"))
    stage.intake.submit(stage.ask("b"))
    assert not stage.link.sent
    stage.link.say(Ready({"max_total_num_tokens": 100, "context_len": 32}))
    assert [r.rid for r in stage.link.requests] == ["a", "b"]
    assert stage.intake.facts.context_len == 32 and stage.intake.facts.max_total_tokens == 100


async def test_a_stream_continues_where_it_was(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, max_queue_time_s=5.0)
    ids = stage.ids("Hello world, how are you today?")
    task = asyncio.create_task(stage.intake.collect(stage.ask(max_new_tokens=40)))
    await asyncio.sleep(0)
    first = stage.link.requests[0]
    done = 0
    for step in (2, 0, 3):  # three deaths, one before any new token
        for token in ids[done : done + step]:
            stage.reply("r", [token])
        done += step
        stage.intake.lose_engine()
        assert not stage.intake.ready.is_set()
        stage.ready()
        sent = stage.link.requests[-1]
        assert sent.ids().tolist() == [5, 6, 7, *ids[:done]] and sent.num_emitted == done
        assert sent.is_quarantined and sent.sampling == first.sampling
        assert sent.queue_deadline_s == 0.0 and sent.deadline_s == first.deadline_s
    stage.reply("r", ids[done:], LENGTH)
    (output,) = await task
    assert output.token_ids == ids and output.text == "Hello world, how are you today?"


async def test_late_tokens_of_a_dead_engine_count(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stage.intake.submit(stage.ask("a"))
    (ended,) = stage.intake.submit(stage.ask("b"))
    stage.intake.lose_engine()
    stage.reply("a", [9, 10])
    stage.reply("b", [9], LENGTH)
    stage.ready()
    assert [(r.rid, r.num_emitted) for r in stage.link.requests[2:]] == [("a", 2)]
    assert (await ended.next()).finish == LENGTH


async def test_a_waiting_request_keeps_its_queue_deadline(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, max_queue_time_s=5.0)
    stage.intake.submit(stage.ask())
    stage.intake.lose_engine()
    stage.ready()
    first, again = stage.link.requests
    assert again.queue_deadline_s == first.queue_deadline_s > 0


async def test_a_poison_request_fails_alone_the_second_time(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    states = {rid: stage.intake.submit(stage.ask(rid))[0] for rid in ("good", "bad")}
    stage.intake.lose_engine(None)
    stage.ready()
    stage.intake.lose_engine("bad")
    stage.ready()
    assert len(stage.intake.requests) == 2
    stage.intake.lose_engine("bad")
    finish = (await states["bad"].next()).finish
    assert finish is not None and (finish.kind, finish.status) == ("error", 500)
    assert "2 times" in (finish.message or "")
    stage.ready()
    assert [r.rid for r in stage.link.requests[-1:]] == ["good"]
    assert ("bad", "error") in stage.watch.done


async def test_a_token_clears_the_suspect(tokenizer: Tokenizer) -> None:
    """An engine that is killed from outside again and again must not cost a request its life."""
    stage = IntakeHarness(tokenizer)
    stage.intake.submit(stage.ask())
    for _ in range(5):
        stage.intake.lose_engine("r")
        stage.ready()
        stage.reply("r", [9])
    assert list(stage.intake.requests) == ["r"]


async def test_control_does_not_wait_for_a_dead_engine(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    call = asyncio.create_task(stage.intake.control("info"))
    await asyncio.sleep(0)
    stage.intake.lose_engine()
    with pytest.raises(Overloaded) as refused:
        await call
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        await stage.intake.control("info")
    assert len(stage.link.controls) == 1


@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_aborted_stays_aborted(tokenizer: Tokenizer, moment: str) -> None:
    """An abort that the engine never heard of, as it died, must not be forgotten."""
    stage = IntakeHarness(tokenizer)
    aborted, other = (stage.intake.submit(stage.ask(rid))[0] for rid in ("x", "y"))
    if moment == "before":
        stage.intake.abort("x")
    stage.intake.lose_engine()
    if moment == "while":
        assert stage.intake.abort("x") == 1
    stage.ready()
    if moment == "after":
        stage.intake.abort("x")
        stage.reply("x", [], Finish("abort"))
    output = await aborted.next()
    assert output.finish is not None and output.finish.kind == "abort"
    assert list(stage.intake.requests) == ["y"] and not other.ended
    assert ("x", "abort") in stage.watch.done


async def test_abort_all_while_there_is_no_engine(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, is_ready=False)
    states = [stage.intake.submit(stage.ask(rid))[0] for rid in ("x", "y")]
    assert stage.intake.abort_all() == 2
    assert all(state.ended for state in states) and not stage.intake.requests
    stage.ready()
    assert not stage.link.requests


async def test_what_another_http_process_has_paused_stays_paused(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    for is_paused in (True, False):
        stage.link.say(Heartbeat(LoadReport(is_paused=is_paused)))
        assert stage.intake.is_paused == is_paused
        stage.intake.lose_engine()
        before = len(stage.link.controls)
        stage.ready()
        assert [control.verb for control in stage.link.controls[before:]] == ["pause"] * is_paused


async def test_a_paused_server_stays_paused(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stage.intake.is_paused = True
    stage.intake.submit(stage.ask())
    stage.intake.lose_engine()
    before = len(stage.link.sent)
    stage.ready()
    pause, request = stage.link.sent[before:]
    assert (pause.verb, pause.args) == ("pause", {"mode": "in_place"}) and request.rid == "r"


async def test_giving_up_fails_every_request_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    stage = IntakeHarness(tokenizer)
    told: list[Failed] = []
    stage.intake.on_failed = told.append
    (state,) = stage.intake.submit(stage.ask())
    call = asyncio.create_task(stage.intake.control("info"))
    await asyncio.sleep(0)
    stage.link.say(Failed("ConfigError", "--page-size 3: no"))
    stage.intake.give_up(Failed("EngineError", "the engine process refused to start"))
    assert [f.kind for f in told] == ["ConfigError"]
    assert stage.intake.failure is told[0]
    assert not caplog.messages  # the reader reports the failure, once
    finish = (await state.next()).finish
    assert finish is not None and (finish.kind, finish.status) == ("error", 503)
    with pytest.raises(Overloaded, match="page-size"):
        await call
    with pytest.raises(Overloaded):
        stage.intake.submit(stage.ask("late"))
    assert not stage.intake.ready.is_set()
