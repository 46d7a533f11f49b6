"""Prompts in, text out: messages to the engine, and what its replies become."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from radixlm.base.errors import InvalidRequest, Overloaded, PromptTooLong
from radixlm.intake import tokenizer_manager
from radixlm.intake.identity import Identity, set_identity
from radixlm.intake.records import GenerateRequest
from radixlm.multimodal.processor import Prompt
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.media import Media
from radixlm.wire.replies import ControlReply, Finish, Logprobs, StepReply, TokenDelta
from radixlm.wire.requests import LogprobParams, StreamingWindow
from radixlm.wire.sampling_params import SamplingParams, parallel_seed
from tests.intake.scripted_engine import IntakeHarness

LENGTH = Finish("length")


async def test_deltas_join_to_the_text(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    text = "Grüße, 你好 😀 fox"
    ids = stage.ids(text)
    stream = stage.intake.stream(stage.ask())
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    pieces = []
    for i, token in enumerate(ids):
        stage.reply("r", [token], LENGTH if i == len(ids) - 1 else None)
        pieces.append(await first if i == 0 else await anext(stream))
    assert "".join(p.text for p in pieces) == text
    assert all("\ufffd" not in p.text for p in pieces)
    assert [p.completion_tokens for p in pieces] == list(range(1, len(ids) + 1))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert not stage.intake.requests and not stage.link.aborts
    assert stage.watch.done == [("r", "length")] and stage.watch.tokens == len(ids)


async def test_text_is_tokenised_and_the_seed_fixed(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stage.intake.submit(stage.ask(text="Hello world"))
    (sent,) = stage.link.requests
    assert sent.ids().tolist() == tokenizer.encode("Hello world", True)
    assert sent.sampling.sampling_seed is not None


@pytest.mark.parametrize("skips", [True, False])
async def test_a_stop_string_that_names_a_special_token_is_its_id(
    tokenizer: Tokenizer, skips: bool
) -> None:
    """A skipped token has no text in which the string could be found."""
    stage = IntakeHarness(tokenizer)
    stops = ("<|im_end|>", "a", "no token at all")
    stage.intake.submit(stage.ask(stop=stops, skip_special_tokens=skips, stop_token_ids=(9,)))
    (sent,) = stage.link.requests
    named = (tokenizer.token_id("<|im_end|>"),) if skips else ()
    assert sent.sampling.stop_token_ids == (9, *named)


async def test_a_slow_reader_gets_merged_output(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    (state,) = stage.intake.submit(stage.ask())
    ids = stage.ids("The quick brown fox")
    for token in ids:
        stage.reply("r", [token], logprobs=Logprobs([(-1.0, token)], [None], [None]))
    output = await state.next()
    assert output.text == "The quick brown fox" and output.token_ids == ids
    assert output.logprobs is not None and [t for _, t in output.logprobs.chosen] == ids
    assert state.pending is None


async def test_parallel_samples_of_a_slow_reader(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    ids = stage.ids("yes no true")
    async with aclosing(stage.intake.stream(stage.ask(n=3, sampling_seed=2**63 - 1))) as stream:
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert [r.rid for r in stage.link.requests] == ["r#0", "r#1", "r#2"]
        seeds = [r.sampling.sampling_seed for r in stage.link.requests]
        assert seeds == [parallel_seed(2**63 - 1, i) for i in range(3)]
        assert all(s is not None and -(2**63) <= s < 2**63 for s in seeds)
        assert all(r.sampling.n == 1 for r in stage.link.requests)
        for token in ids:
            stage.link.say(StepReply([TokenDelta(rid=f"r#{i}", tokens=[token]) for i in range(3)]))
        # unread output is merged into one for each sample
        found = {(await first).index: ids}
        for _ in range(2):
            output = await anext(stream)
            found[output.index] = output.token_ids
        assert found == {0: ids, 1: ids, 2: ids}
        for i in (2, 0, 1):
            stage.reply(f"r#{i}", [], LENGTH)
        assert sorted([(await anext(stream)).index for _ in range(3)]) == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not stage.intake.requests


@pytest.mark.parametrize("trim", [True, False])
async def test_stop_string_across_deltas(tokenizer: Tokenizer, trim: bool) -> None:
    stage = IntakeHarness(tokenizer)
    task = asyncio.create_task(
        stage.intake.collect(stage.ask(stop=("o w",), no_stop_trim=not trim))
    )
    await asyncio.sleep(0)
    for token in [i for char in "Hello world" for i in stage.ids(char)]:
        stage.reply("r", [token])
    (output,) = await task
    assert output.text == ("Hell" if trim else "Hello w")
    assert output.finish == Finish("stop", matched="o w")
    assert stage.link.aborts[0].rids == ("r",) and stage.link.aborts[0].quiet
    assert len(stage.link.aborts) == 1


@pytest.mark.parametrize("at_once", [1, 2, 7, 40])
async def test_a_stop_ends_at_the_same_token_in_any_delta(
    tokenizer: Tokenizer, at_once: int
) -> None:
    stage = IntakeHarness(tokenizer, hidden_states_enabled=True)
    ask = stage.ask(stop=("o w", "rl"), logprobs=LogprobParams(), return_hidden_states=True)
    task = asyncio.create_task(stage.intake.collect(ask))
    await asyncio.sleep(0)
    ids = [i for char in "Hello world" for i in stage.ids(char)]
    for first in range(0, len(ids), at_once):
        new = ids[first : first + at_once]
        told = Logprobs([(-float(first + i), token) for i, token in enumerate(new)])
        states = [bytes([first + i]) * 4 for i in range(len(new))]
        is_last = first + at_once >= len(ids)
        stage.reply("r", new, LENGTH if is_last else None, logprobs=told, hidden_states=states)
    (output,) = await task
    count = len(ids) - 4  # the stop string ends with the "w"
    assert output.text == "Hell" and output.finish == Finish("stop", matched="o w")
    assert output.token_ids == ids[:count] and output.completion_tokens == count
    assert output.logprobs is not None
    assert output.logprobs.chosen == [(-float(i), ids[i]) for i in range(count)]
    assert output.hidden_states == [bytes([i]) * 4 for i in range(count)]


async def test_held_back_text_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    task = asyncio.create_task(stage.intake.collect(stage.ask(stop=("fox!",))))
    await asyncio.sleep(0)
    ids = stage.ids("a fox")
    stage.reply("r", ids[:-1])
    stage.reply("r", ids[-1:], LENGTH)
    (output,) = await task
    assert output.text == "a fox" and output.finish == LENGTH


@pytest.mark.parametrize("trim", [True, False])
async def test_stop_token_is_not_part_of_the_text(tokenizer: Tokenizer, trim: bool) -> None:
    stage = IntakeHarness(tokenizer)
    task = asyncio.create_task(stage.intake.collect(stage.ask(no_stop_trim=not trim)))
    await asyncio.sleep(0)
    (stop,) = stage.ids("!")
    stage.reply("r", [*stage.ids("fox"), stop], Finish("stop", matched=stop))
    (output,) = await task
    assert output.text == ("fox" if trim else "fox!")
    assert output.token_ids[-1] == stop and output.finish is not None
    assert output.finish.matched == stop


BAD = [
    ({"input_ids": [5, 10**6]}, InvalidRequest, "input_ids"),
    ({"input_ids": [-1]}, InvalidRequest, "input_ids"),
    ({"input_ids": [2**31]}, InvalidRequest, "input_ids"),
    ({"input_ids": []}, InvalidRequest, "text"),
    ({"input_ids": [5] * 64}, PromptTooLong, "prompt"),
    ({"max_new_tokens": 62}, PromptTooLong, "max_tokens"),
    ({"rid": "x" * 600}, InvalidRequest, "rid"),
    ({"rid": "a\0"}, InvalidRequest, "rid"),
    ({"rid": "\ud800"}, InvalidRequest, "rid"),
    ({"extra_key": "\udfff"}, InvalidRequest, "extra_key"),
    ({"stop": ("\ud800",)}, InvalidRequest, "stop"),
    ({"return_hidden_states": True}, InvalidRequest, "return_hidden_states"),
    ({"logprobs": LogprobParams(top=10**6)}, InvalidRequest, "top_logprobs"),
    ({"logprobs": LogprobParams(token_ids=(-1,))}, InvalidRequest, "token_ids_logprob"),
    ({"logprobs": LogprobParams(token_ids=(2**40,))}, InvalidRequest, "token_ids_logprob"),
    ({"processor": "nobody's"}, InvalidRequest, "custom_logit_processor"),
    ({"adapter": "nobody's"}, InvalidRequest, "lora_path"),
    ({"embeds": b"\0" * 40, "num_embeds": 2}, InvalidRequest, "input_embeds"),
    ({"embeds": b"\0" * 16 * 64, "num_embeds": 64}, PromptTooLong, "input_embeds"),
    ({"embeds": b"", "num_embeds": 0}, InvalidRequest, "text"),
]


async def test_the_flag_that_makes_room_is_named_where_the_cache_is_short() -> None:
    stage = IntakeHarness(None)  # of a model that reads 64 tokens
    for context_len, num_prompt, num_new, is_named in (
        (64, 64, 1, False),
        (64, 1, 64, False),
        (60, 62, 1, True),
        (60, 1, 62, True),
        (60, 64, 1, False),  # the model itself reads no more
        (60, 1, 64, False),
    ):
        stage.intake.become_ready({"max_total_num_tokens": 4096, "context_len": context_len})
        with pytest.raises(PromptTooLong, match="tokens") as refused:
            stage.intake.submit(stage.ask(input_ids=[5] * num_prompt, max_new_tokens=num_new))
        assert ("--mem-fraction-static" in str(refused.value)) == is_named


async def test_embeddings_of_any_width_where_the_width_is_not_known() -> None:
    stage = IntakeHarness(None)
    stage.intake.submit(stage.ask(embeds=b"\0" * 48, num_embeds=3))
    (sent,) = stage.link.requests
    assert len(sent.ids()) == 3 and sent.embeds == b"\0" * 48


@pytest.mark.parametrize(("fields", "error", "param"), BAD)
async def test_a_bad_request_is_named_and_leaves_nothing(
    tokenizer: Tokenizer, fields: dict[str, object], error: type[InvalidRequest], param: str
) -> None:
    stage = IntakeHarness(tokenizer, embed_dim=4)
    with pytest.raises(error) as caught:
        stage.intake.submit(stage.ask(**{"rid": "r", **fields}))
    assert caught.value.param == param and caught.value.status == 400
    assert not stage.intake.requests and not stage.link.sent and not stage.watch.begun


async def test_a_request_that_cannot_be_sent_leaves_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted as running for ever, and failed again with each new engine."""
    stage = IntakeHarness(tokenizer)

    def refuse(message: object) -> None:
        raise OverflowError("can't serialize ints < -2**63 or > 2**64 - 1")

    with monkeypatch.context() as patched:
        patched.setattr(stage.link, "send", refuse)
        patched.setattr(stage.intake.replicas, "send", lambda message: None)
        with pytest.raises(InvalidRequest, match="64 bits"):
            stage.intake.submit(stage.ask(rid="r", n=2))
    assert not stage.intake.requests and stage.watch.done == [("r#0", "abort")]


async def test_text_without_a_tokenizer() -> None:
    stage = IntakeHarness(None)
    with pytest.raises(InvalidRequest, match="skip-tokenizer-init"):
        stage.intake.submit(stage.ask(text="hello"))
    task = asyncio.create_task(stage.intake.collect(stage.ask()))
    await asyncio.sleep(0)
    stage.reply("r", [9, 8], LENGTH)
    (output,) = await task
    assert output.token_ids == [9, 8] and output.text == ""


async def test_auto_truncate_cuts_prompt_and_answer(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, allow_auto_truncate=True)
    stage.intake.submit(stage.ask(input_ids=list(range(5, 105)), max_new_tokens=50))
    (sent,) = stage.link.requests
    assert sent.ids().tolist() == list(range(5, 68)) and sent.sampling.max_new_tokens == 1


async def test_unset_max_new_tokens_fills_the_context(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stage.intake.submit(stage.ask(max_new_tokens=None))
    assert stage.link.requests[0].sampling.max_new_tokens == 61


async def test_a_streaming_window_lifts_the_bounds_of_the_context(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, streaming_sinks=3)
    ids = list(range(5, 405))
    stage.intake.submit(stage.ask(input_ids=ids, max_new_tokens=None, streaming_window=61))
    (sent,) = stage.link.requests
    assert sent.ids().tolist() == ids and sent.streaming == StreamingWindow(61, 3)
    assert (sent.sampling.max_new_tokens or 0) > 1 << 29
    with pytest.raises(InvalidRequest, match="longer than the model"):
        stage.intake.submit(stage.ask("s", input_ids=ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streaming_window": 62}, "62 tokens beside 3 sinks.*16 to 61"),
        ({"streaming_window": 15}, "15 tokens"),
        ({"streaming_window": 20, "streaming_sinks": 45}, "16 to 19"),
        ({"streaming_sinks": 4}, "needs a streaming_window"),
        ({"streaming_window": 20, "embeds": b"", "num_embeds": 0}, "input_embeds cannot be"),
        ({"streaming_window": 20, "logprobs": LogprobParams(0)}, "neither hidden states nor"),
    ],
)
async def test_streaming_windows_that_cannot_be(
    tokenizer: Tokenizer, fields: dict[str, Any], message: str
) -> None:
    stage = IntakeHarness(tokenizer, streaming_sinks=3)
    with pytest.raises(InvalidRequest, match=message):
        stage.intake.submit(stage.ask(**fields))


async def test_the_streaming_window_of_the_server(tokenizer: Tokenizer) -> None:
    """Of requests that name none, unless they need tokens that it drops."""
    stage = IntakeHarness(tokenizer, streaming_window=32)
    asked: list[dict[str, Any]] = [
        {},
        {"streaming_window": 0},
        {"streaming_window": 16},
        {"streaming_sinks": 9},
        {"logprobs": LogprobParams(0)},
        {"logprobs": LogprobParams(-1)},
    ]
    for place, fields in enumerate(asked):
        stage.intake.submit(stage.ask(str(place), **fields))
    assert [request.streaming for request in stage.link.requests] == [
        StreamingWindow(32, 4),
        None,
        StreamingWindow(16, 4),
        StreamingWindow(32, 9),
        None,
        StreamingWindow(32, 4),
    ]


async def test_an_id_is_used_once_at_a_time(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stage.intake.submit(stage.ask("a"))
    with pytest.raises(InvalidRequest, match="Duplicate request ID"):
        stage.intake.submit(stage.ask("a"))
    stage.intake.submit(stage.ask("b#1"))
    with pytest.raises(InvalidRequest, match="Duplicate request ID"):
        stage.intake.submit(stage.ask("b", n=3))
    assert sorted(stage.intake.requests) == ["a", "b#1"]
    stage.reply("a", [9], LENGTH)
    stage.intake.submit(stage.ask("a"))
    assert "a" in stage.intake.requests


async def test_deadlines_are_set(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer, request_timeout_s=30.0, max_queue_time_s=5.0)
    stage.intake.submit(stage.ask("a"))
    stage.intake.submit(stage.ask("b", timeout_s=7.0))
    a, b = stage.link.requests
    assert a.deadline_s - a.arrival_s == pytest.approx(30)
    assert a.queue_deadline_s - a.arrival_s == pytest.approx(5)
    assert b.deadline_s - b.arrival_s == pytest.approx(7)


async def test_leaving_a_stream_aborts_it(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    stream = stage.intake.stream(stage.ask(n=2))
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stage.reply("r#0", [9], LENGTH)
    await task
    await stream.aclose()
    assert not stage.intake.requests
    assert [(a.rids, a.quiet) for a in stage.link.aborts] == [(("r#1",), True)]
    stage.reply("r#1", [9])  # was under way, so nothing fails


async def test_cancelling_collect_aborts_it(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    task = asyncio.create_task(stage.intake.collect(stage.ask()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not stage.intake.requests and stage.link.aborts[0].rids == ("r",)


async def test_abort_finds_all_samples_and_no_other_request(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    for rid, n in (("a", 2), ("b", 1), ("a#x", 1)):
        stage.intake.submit(stage.ask(rid, n=n))
    assert stage.intake.abort("") == 0
    assert stage.intake.abort("nobody") == 0 and not stage.link.aborts
    assert stage.intake.abort("b", "because") == 1
    assert stage.link.aborts[-1].rids == ("b",) and stage.link.aborts[-1].message == "because"
    assert stage.intake.abort("a") == 3  # a#x looks like a sample of a
    assert stage.intake.abort_all() == 4


async def test_a_failing_detokenizer_fails_its_request_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = IntakeHarness(tokenizer)
    bad, good = (stage.intake.submit(stage.ask(rid))[0] for rid in ("bad", "good"))

    def burst(ids: object) -> str:
        raise RuntimeError("burst")

    monkeypatch.setattr(bad.detokenizer, "feed", burst)
    stage.link.say(StepReply([TokenDelta(rid=r, tokens=[9]) for r in ("bad", "good")]))
    finish = (await bad.next()).finish
    assert finish is not None and (finish.kind, finish.status) == ("error", 500)
    assert (await good.next()).token_ids == [9] and list(stage.intake.requests) == ["good"]
    assert stage.link.aborts[0].rids == ("bad",)


async def test_a_client_that_does_not_read_loses_its_slot(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = IntakeHarness(tokenizer, stall_timeout_s=3.0)
    now_s = [1000.0]
    monkeypatch.setattr("radixlm.intake.tokenizer_manager.time.monotonic", lambda: now_s[0])
    stage.beat()
    stuck, reads, waits = (stage.intake.submit(stage.ask(r))[0] for r in ("stuck", "reads", "w"))
    for _ in range(3):
        now_s[0] += 1.0
        for rid in ("stuck", "reads"):
            stage.reply(rid, [9])
        await reads.next()
        stage.beat()
    assert len(stage.intake.requests) == 3
    now_s[0] += 500.0  # this process was paused, which must not count as a stall of clients
    stage.beat()
    assert sorted(stage.intake.requests) == ["reads", "w"]
    assert [(a.rids, a.quiet) for a in stage.link.aborts] == [(("stuck",), True)]
    output = await stuck.next()
    assert output.token_ids == [9, 9, 9] and output.finish is not None
    assert (output.finish.kind, output.finish.status) == ("abort", 408)
    assert not waits.ended and not reads.ended


async def test_control_is_answered_by_call(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    calls = [asyncio.create_task(stage.intake.control("info", number=i)) for i in range(2)]
    await asyncio.sleep(0)
    for control in reversed(stage.link.controls):
        stage.link.say(ControlReply(control.call_id, True, data=control.args["number"]))
    assert [(await call).data for call in calls] == [0, 1]
    stage.link.say(ControlReply("stranger", True))


async def test_drain_waits_for_running_requests(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    (state,) = stage.intake.submit(stage.ask())
    drain = asyncio.create_task(stage.intake.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        stage.intake.submit(stage.ask("late"))
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert not drain.done()
    stage.reply("r", [9], LENGTH)
    assert await drain is True
    assert (await state.next()).finish == LENGTH


async def test_a_drain_that_takes_too_long_is_reported(tokenizer: Tokenizer) -> None:
    stage = IntakeHarness(tokenizer)
    (state,) = stage.intake.submit(stage.ask())
    assert await stage.intake.drain(0.001) is False
    finish = (await state.next()).finish
    assert finish is not None and (finish.kind, finish.status) == ("error", 503)
    assert await stage.intake.drain(0.001) is True  # nothing is left


async def test_tenants_share_no_encoder_outputs(tokenizer: Tokenizer) -> None:
    """Outputs are found by their digest, so keys with caches of their own have other digests."""
    stage = IntakeHarness(tokenizer)
    ids = np.array([5, 6], np.int32)
    prompt = Prompt(ids, ids, (Media("image", b"d" * 32, ((0, 1),), {}),), None)

    def digest(rid: str, owner: str, has_own_cache: bool) -> bytes:
        set_identity(Identity(owner, has_own_cache=has_own_cache))
        request = GenerateRequest(SamplingParams(max_new_tokens=1), prompt=prompt, rid=rid)
        stage.intake.submit(request)
        return stage.link.requests[-1].media[0].digest

    assert digest("1", "alice", False) == digest("2", "bob", False) == b"d" * 32
    alice = digest("3", "alice", True)
    assert len(alice) == 32 and alice == digest("4", "alice", True)
    assert len({alice, digest("5", "bob", True), b"d" * 32}) == 3


async def test_tokens_of_a_request_that_ended_here_are_not_those_of_the_next_of_its_id(
    tokenizer: Tokenizer,
) -> None:
    """Its engine computes some more tokens before it reads of the end."""
    stage = IntakeHarness(tokenizer)
    ask = stage.ask(text="hello", stop=("wor",))
    first = asyncio.create_task(stage.intake.collect(ask))
    await asyncio.sleep(0)
    stage.reply("r", stage.ids("hello world"))
    assert (await first)[0].finish == Finish("stop", matched="wor")
    second = asyncio.create_task(stage.intake.collect(stage.ask()))
    while not stage.link.controls:
        await asyncio.sleep(0)
    (ping,) = stage.link.controls
    stage.reply("r", stage.ids(" of the first"))
    assert ping.verb == "ping" and len(stage.link.requests) == 1
    stage.link.say(ControlReply(ping.call_id, True))
    while len(stage.link.requests) < 2:
        await asyncio.sleep(0)
    stage.reply("r", stage.ids("second"), Finish("length"))
    assert (await second)[0].text == "second"
    assert not stage.intake._ended


async def test_ids_of_requests_that_ended_here_are_not_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_manager, "MAX_ENDED", 2)
    stage = IntakeHarness(tokenizer)
    for number in range(5):
        stage.intake.leave(stage.intake.submit(stage.ask(f"r{number}")))
    await asyncio.sleep(0)
    (ping,) = stage.link.controls
    stage.link.say(ControlReply(ping.call_id, True))
    while stage.intake._ended:
        await asyncio.sleep(0)
