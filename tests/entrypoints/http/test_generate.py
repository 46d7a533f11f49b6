"""The native route /generate, its streams, sessions and aborts."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer

from radixlm.entrypoints.http import tokenization

GREEDY = {"temperature": 0, "max_new_tokens": 64}


async def test_one_text(server: ScriptedServer) -> None:
    got = (await server.post("/generate", text="hi", sampling_params=GREEDY)).json()
    assert got["text"] == "Hello there."
    meta = got["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"
    assert meta["completion_tokens"] == len(got["output_ids"])
    assert meta["weight_version"] == "default" and meta["e2e_latency"] > 0


async def test_lists_give_lists(server: ScriptedServer) -> None:
    got = (await server.post("/generate", text=["hi", "stop me"], sampling_params=GREEDY)).json()
    assert [answer["text"] for answer in got] == ["Hello there.", "one two STOP three"]
    two = (await server.post("/generate", text="hi", sampling_params={"n": 2})).json()
    assert [answer["text"] for answer in two] == ["Hello there."] * 2


async def test_streams_are_cumulative(server: ScriptedServer) -> None:
    server.engine.executor.is_slow = True
    events = await server.events("/generate", text="stop me", sampling_params=GREEDY)
    texts = [event["text"] for event in events]
    assert texts[-1] == "one two STOP three" and len(texts) > 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


async def test_logprobs_of_prompt_and_output(server: ScriptedServer) -> None:
    got = await server.post(
        "/generate",
        text="stop me",
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = got.json()["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert all(len(row) == 2 for row in meta["output_top_logprobs"])


async def test_choices_behind_a_long_text_are_scored_alone(
    server: ScriptedServer, monkeypatch: Any
) -> None:
    body = {"text": "one two three four", "score_choices": [" five", " six seven"]}
    found, start = [], len(server.tokenizer.encode("one two three four"))
    for limit in (tokenization.LONG_TEXT_CHARS, 8):  # above it in a thread
        monkeypatch.setattr(tokenization, "LONG_TEXT_CHARS", limit)
        answers = (await server.post("/generate", **body)).json()
        found.append([one["meta_info"]["input_token_logprobs"] for one in answers])
        counts = [one["meta_info"]["prompt_tokens"] for one in answers]
        assert [len(tokens) for tokens in found[-1]] == [count - start + 2 for count in counts]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [10**12]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "temperature"),
        ({"text": "a", "sampling_params": {"stop": ["x"] * 2000}}, "stop"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "stream": "perhaps"}, "stream"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": "a", "return_hidden_states": "first"}, "return_hidden_states"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": "x\ny"}, "rid"),
        ({"text": "a", "priority": 10**40}, "priority"),
        ({"text": "a", "timeout": -5}, "timeout"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "custom_logit_processor": "code"}, "custom_logit_processor"),
        ({"text": "word " * 5000}, "text"),
        ({"text": "x" * 5_000_000}, "text"),
    ],
)
async def test_a_bad_field_is_named(
    server: ScriptedServer, body: dict[str, Any], param: str
) -> None:
    got = await server.post("/generate", **body)
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == param


async def test_abort_reports_whether_it_found_a_request(server: ScriptedServer) -> None:
    server.engine.executor.is_slow = True
    body = {"text": "forever", "rid": "mine", "sampling_params": {"max_new_tokens": 1000}}
    running = asyncio.create_task(server.post("/generate", **body))
    while "mine" not in server.engine.intake.requests:
        await asyncio.sleep(0)
    twice = await server.post("/generate", **body)
    assert twice.status_code == 400 and twice.json()["error"]["param"] == "rid"
    assert "Duplicate request ID" in twice.json()["error"]["message"]  # as SGLang
    got = (await server.post("/abort_request", rid="mine")).json()
    assert got == {"success": True, "num_aborted": 1}
    assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await server.post("/abort_request", rid="other")).json()["success"] is False


async def test_a_session_continues_an_earlier_request(server: ScriptedServer) -> None:
    name = (await server.post("/open_session", capacity_of_str_len=1000)).json()
    session: dict[str, Any] = {"id": name}
    body: dict[str, Any] = {"sampling_params": GREEDY, "session_params": session}
    first = (await server.post("/generate", text="hi", rid="one", **body)).json()
    num_first = first["meta_info"]["prompt_tokens"] + first["meta_info"]["completion_tokens"]
    session["rid"] = "one"
    second = (await server.post("/generate", text="grüße", rid="two", **body)).json()
    assert second["text"].startswith("Grüße")
    num_new = len(server.tokenizer.encode("grüße"))
    assert second["meta_info"]["prompt_tokens"] == num_first + num_new
    assert second["meta_info"]["cached_tokens"] > 0
    session["drop_previous_output"] = True
    third = (await server.post("/generate", text="grüße", rid="three", **body)).json()
    assert third["meta_info"]["prompt_tokens"] == first["meta_info"]["prompt_tokens"] + num_new
    session |= {"drop_previous_output": False, "offset": 1, "replace": True}
    fourth = (await server.post("/generate", text="grüße", rid="four", **body)).json()
    assert fourth["meta_info"]["prompt_tokens"] == 1 + num_new
    session |= {"rid": "two", "replace": False}
    gone = await server.post("/generate", text="x", **body)
    assert gone.json()["error"]["param"] == "session_params.rid", "replaced with its branch"
    assert (await server.post("/close_session", session_id=name)).status_code == 200
    closed = await server.post("/generate", text="x", **body)
    assert closed.json()["error"]["param"] == "session_params.id"


@pytest.mark.parametrize("params", [{}, {"id": None, "rid": None}])
async def test_a_session_of_nulls_is_none(server: ScriptedServer, params: dict[str, Any]) -> None:
    body: dict[str, Any] = {"text": "hi", "sampling_params": GREEDY}
    plain = (await server.post("/generate", **body)).json()
    assert (await server.post("/generate", session_params=params, **body)).json()["text"] == (
        plain["text"]
    )


async def test_a_refused_request_leaves_no_trace_in_its_session(server: ScriptedServer) -> None:
    name = (await server.client.post("/open_session?capacity_of_str_len=20")).json()
    body: dict[str, Any] = {"session_params": {"id": name}, "rid": "one"}
    bad = await server.post("/generate", text="hi", sampling_params={"top_p": 9}, **body)
    assert bad.status_code == 400
    full = await server.post("/generate", text="word " * 50, sampling_params=GREEDY, **body)
    assert "capacity" in full.json()["error"]["message"]
    good = await server.post("/generate", text="hi", sampling_params=GREEDY, **body)
    assert good.status_code == 200
