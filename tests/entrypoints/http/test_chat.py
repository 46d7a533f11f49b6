"""/v1/chat/completions: the response fields that clients rely on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.text.chat import ChatTemplate

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
UNTYPED = {"type": "function", "function": {"name": "f", "parameters": {"type": "unknown"}}}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_the_answer_has_the_form_of_openai(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, model="tiny", messages=user("hi"))).json()
    assert got["id"].startswith("chatcmpl-") and got["object"] == "chat.completion"
    (choice,) = got["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello there."
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == server.tokenizer.token_id("<|im_end|>")
    usage = got["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_a_stream_has_one_role_one_finish_and_the_usage_last(server: ScriptedServer) -> None:
    chunks = await server.events(
        CHAT, messages=user("hi"), n=2, stream_options={"include_usage": True}
    )
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert [c["delta"].get("role") for c in mine].count("assistant") == 1
        none = {"reasoning_content": None, "tool_calls": None}
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} | none
        assert all(set(c["delta"]) == {"role", "content", *none} for c in mine)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content") or "" for c in mine) == "Hello there."


@pytest.mark.parametrize("wants", ["grüße", "stop me", "sum please", "think about"])
async def test_a_stream_says_what_the_whole_answer_says(server: ScriptedServer, wants: str) -> None:
    body: dict[str, Any] = {"messages": user(wants), "stop": ["STOP"], "tools": [ADD]}
    if wants == "think about":
        body["chat_template_kwargs"] = {"enable_thinking": True}
    whole = (await server.post(CHAT, **body)).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in await server.events(CHAT, **body)]
    text = "".join(c["delta"].get("content") or "" for c in chunks)
    thought = "".join(c["delta"].get("reasoning_content") or "" for c in chunks)
    assert text.strip() == (whole["message"]["content"] or "").strip()
    assert thought == (whole["message"]["reasoning_content"] or "")
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    deltas = [call for c in chunks for call in c["delta"].get("tool_calls") or []]
    arguments = "".join(call["function"]["arguments"] for call in deltas)
    calls = whole["message"]["tool_calls"] or []
    assert arguments == "".join(call["function"]["arguments"] for call in calls)


async def test_calls_are_read_and_named(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, messages=user("sum please"), tools=[ADD])).json()["choices"][0]
    assert got["finish_reason"] == "tool_calls"
    assert got["message"]["content"] == "I will add."
    (call,) = got["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


async def test_without_parallel_calls_the_first_one_counts(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"messages": user("two calls"), "tools": [ADD]}
    both = (await server.post(CHAT, **body)).json()["choices"][0]["message"]["tool_calls"]
    assert [call["index"] for call in both] == [0, 1] and both[0]["id"] != both[1]["id"]
    one = await server.post(CHAT, **body, parallel_tool_calls=False)
    assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_tool_choice_none_leaves_the_text_alone(server: ScriptedServer) -> None:
    got = await server.post(CHAT, messages=user("sum please"), tools=[ADD], tool_choice="none")
    choice = got.json()["choices"][0]
    assert "<tool_call>" in choice["message"]["content"] and choice["finish_reason"] == "stop"


async def test_reasoning_is_separate_unless_refused(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"messages": user("think about"), "reasoning_effort": "high"}
    got = (await server.post(CHAT, **body)).json()
    message = got["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "It is simple."
    assert message["content"].strip() == "The answer is 42."
    assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "reasoning" not in message
    both = (await server.post(CHAT, **body, include_reasoning=True)).json()
    wanted = message | {"reasoning": message["reasoning_content"]}
    assert both["choices"][0]["message"] == wanted
    chunks = await server.events(CHAT, **body, include_reasoning=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)
    assert "".join(delta["reasoning"] or "" for delta in deltas) == wanted["reasoning"]
    hidden = (await server.post(CHAT, **body, include_reasoning=False)).json()
    assert hidden["choices"][0]["message"] == message | {"reasoning_content": None}
    chunks = await server.events(CHAT, **body, include_reasoning=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta["reasoning_content"] for delta in deltas)
    assert "".join(delta["content"] or "" for delta in deltas) == message["content"]
    joined = (await server.post(CHAT, **body, separate_reasoning=False)).json()
    assert "</think>" in joined["choices"][0]["message"]["content"]


@pytest.mark.parametrize("sent", [{"effort": "high"}, {"enabled": True}, {"enabled": False}])
async def test_an_object_reasoning_turns_it_on_and_off(
    server: ScriptedServer, sent: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": user("think about"), "reasoning": sent}
    body["messages"][0]["role"] = "User"  # roles are read in any case
    variables = {"enable_thinking": sent != {"enabled": False}}
    if "effort" in sent:
        variables["reasoning_effort"] = sent["effort"]
    same = {"messages": user("think about"), "chat_template_kwargs": variables}
    got, want = [(await server.post(CHAT, **each)).json() for each in (body, same)]
    assert got["choices"] == want["choices"] and got["usage"] == want["usage"]
    assert bool(got["choices"][0]["message"]["reasoning_content"]) == variables["enable_thinking"]


async def test_ids_beside_messages_give_the_same_reasoning(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"messages": user("think about")}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    ids = (await server.post("/tokenize", **body, **thinks)).json()["tokens"]
    ids += (await server.post("/tokenize", prompt="<think>\n")).json()["tokens"]
    inside = (await server.post(CHAT, **body, input_ids=ids)).json()["choices"][0]["message"]
    ids += (await server.post("/tokenize", prompt="</think>")).json()["tokens"]
    after = (await server.post(CHAT, **body, input_ids=ids)).json()["choices"][0]["message"]
    assert inside["reasoning_content"] and inside != after


async def test_options_of_a_stream_without_one_are_told(server: ScriptedServer) -> None:
    options = {"include_usage": True}
    got = await server.post(CHAT, messages=user("hi"), stream_options=options)
    assert got.json()["usage"] and "stream_options" in got.headers["X-RadixLM-Warning"]


async def test_roles_that_the_template_names_are_taken(server: ScriptedServer) -> None:
    written = server.state.template
    server.state.template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'ipython' %}<tool>{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    try:
        messages = [*user("hi"), {"role": "ipython", "content": "[1]"}]
        got = await server.post(CHAT, messages=messages, return_prompt_token_ids=True)
        ids = got.json()["choices"][0]["prompt_token_ids"]
        assert server.tokenizer.decode(ids) == "hi<tool>[1]", got.text
        for role in ("python", "", None, ["ipython"]):
            got = await server.post(CHAT, messages=[{"role": role, "content": "a"}])
            assert got.json()["error"]["param"] == "messages[0].role", got.text
    finally:
        server.state.template = written


async def test_a_stop_string_never_leaks(server: ScriptedServer) -> None:
    chunks = await server.events(CHAT, messages=user("stop me"), stop="STOP")
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "one two " and chunks[-1]["choices"][0]["matched_stop"] == "STOP"


async def test_logprobs_cover_every_token_of_whole_and_stream(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"messages": user("grüße"), "logprobs": True, "top_logprobs": 2}
    whole = (await server.post(CHAT, **body)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text.startswith("Grüße 😀 aus Köln")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = await server.events(CHAT, **body)
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e for part in parts if part for e in part["content"]] == content
    named = await server.post(CHAT, **body, return_tokens_as_token_ids=True, return_token_ids=True)
    [choice] = named.json()["choices"]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{i}" for i in choice["token_ids"]]
    for chunk in chunks:  # the entries of a chunk are those of its text, of the last the stop's
        choice = chunk["choices"][0]
        entries = (choice["logprobs"] or {"content": []})["content"]
        text = "".join(entry["token"] for entry in entries)
        ends = choice["finish_reason"] == "stop"
        assert len(entries) == 1 if ends else "�" in text or text == choice["delta"]["content"]


async def test_max_tokens_ends_with_length(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, messages=user("forever"), max_completion_tokens=7)).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 7


async def test_unset_max_tokens_fills_the_context(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, messages=user("forever"))).json()["usage"]
    assert got["total_tokens"] == 2048


async def test_cached_tokens_are_reported_by_flag(server: ScriptedServer, toy_folder: Any) -> None:
    assert (await server.post(CHAT, messages=user("hi"))).json()["usage"][
        "prompt_tokens_details"
    ] is None
    async with scripted_server(toy_folder, {}, enable_cache_report=True) as other:
        long = user("the same prefix again and again")
        await other.post(CHAT, messages=long)
        usage = (await other.post(CHAT, messages=long)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_where_cached_tokens_were(server: ScriptedServer) -> None:
    """As SGLang's bench_serving --cache-report reads it: a field, and a chunk of a stream."""
    asks = {"return_cached_tokens_details": True, "max_tokens": 2}
    for path, body in (
        (CHAT, {"messages": user("the same prefix again and again")}),
        ("/v1/completions", {"prompt": "the same prefix of a completion"}),
    ):
        await server.post(path, **body)
        whole = (await server.post(path, **body, **asks)).json()
        details = whole["sglext"]["cached_tokens_details"]
        assert details["device"] > 0 == details["host"]
        chunks = await server.events(path, **body, **asks)
        assert [c["sglext"] for c in chunks if "sglext" in c] == [whole["sglext"]]
        assert "sglext" not in (await server.post(path, **body)).json()


@pytest.mark.parametrize("by_flag", [False, True])
async def test_token_ids_are_told_in_sglext(toy_folder: Path, by_flag: bool) -> None:
    names = "return_input_ids", "return_output_ids"
    options: dict[str, Any] = dict.fromkeys(names, by_flag)
    fields = {} if by_flag else {f"{name}_in_sglext": True for name in names}
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 3, **fields}
    async with scripted_server(toy_folder, {}, **options) as server:
        whole = (await server.post(CHAT, **body, return_token_ids=True)).json()
        chunks = await server.events(CHAT, **body, stream_options={"include_usage": True})
        other = (await server.post(CHAT, **{**body, "return_output_ids_in_sglext": False})).json()
    found = whole["sglext"]
    assert found["input_ids"] == whole["prompt_token_ids"]
    assert found["output_ids"] == [choice["token_ids"] for choice in whole["choices"]]
    assert [c["sglext"] for c in chunks if "sglext" in c] == [found]
    assert chunks[-2]["choices"] == [] and "usage" in chunks[-1]
    assert ("output_ids" in other["sglext"]) == by_flag


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": user("x"), "temperature": "hot"}, "temperature"),
        ({"messages": user("x"), "temperature": -1}, "temperature"),
        ({"messages": user("x"), "top_p": 0}, "top_p"),
        ({"messages": user("x"), "n": 0}, "n"),
        ({"messages": user("x"), "n": 10**30}, "n"),
        ({"messages": user("x"), "max_tokens": -1}, "max_tokens"),
        ({"messages": user("x"), "max_tokens": 10**9}, "max_tokens"),
        ({"messages": user("x"), "seed": 10**40}, "seed"),
        ({"messages": user("x"), "priority": 10**40}, "priority"),
        ({"messages": user("x"), "logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"messages": user("x"), "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": user("x"), "logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"messages": user("x"), "stop": ["a"] * 2000}, "stop"),
        ({"messages": user("x"), "stop": [""]}, "stop"),
        ({"messages": user("x"), "rid": "a\nb"}, "rid"),
        ({"messages": user("x"), "rid": ""}, "rid"),
        ({"messages": user("x"), "tools": [{"type": "function"}]}, "tools"),
        ({"messages": user("x"), "tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"messages": user("x"), "tool_choice": "required"}, "tool_choice"),
        ({"messages": user("x"), "tools": [UNTYPED]}, "tools"),
        ({"messages": user("x"), "tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"messages": user("x"), "tools": [ADD], "tool_choice": {"function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"messages": user("x"), "response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"messages": user("x"), "response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema",
        ),
        (
            {"messages": user("x"), "response_format": {"type": "json_object", "value": 5}},
            "response_format.value",
        ),
        (
            {
                "messages": [*user("x"), {"role": "assistant", "content": "y"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt",
        ),
        ({"messages": user("x"), "modalities": ["audio"]}, "modalities"),
        ({"messages": user("x"), "web_search_options": {"a": 1}}, "web_search_options"),
        ({"messages": user("x"), "session_params": {"id": "no"}}, "session_params.id"),
        ({"messages": user("x"), "timeout": -1}, "timeout"),
        ({"messages": user("x"), "regex": "a", "ebnf": "b"}, "ebnf"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_a_bad_field_is_named(
    server: ScriptedServer, body: dict[str, Any], param: str
) -> None:
    got = await server.post(CHAT, **body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"] == param and param.split(".")[-1].split("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_openai_fields_without_effect_are_accepted(server: ScriptedServer) -> None:
    got = await server.post(
        CHAT,
        messages=user("hi"),
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        user="me",
        modalities=["text"],
        parallel_tool_calls=True,
        safety_identifier="x",
        prompt_cache_key="y",
        verbosity="low",
        prediction=None,
    )
    assert got.status_code == 200, got.text


async def test_an_unknown_model_is_404_with_strict_names(server: ScriptedServer) -> None:
    server.state.config = server.config.with_values({"strict_model_name": True})
    got = await server.post(CHAT, model="gpt-99", messages=user("hi"))
    assert got.status_code == 404 and got.json()["error"]["code"] == "model_not_found"
    for name in ("tiny", "tiny:latest", "default"):
        assert (await server.post(CHAT, model=name, messages=user("hi"))).status_code == 200


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


async def test_a_strict_schema_that_cannot_be_enforced_is_refused(server: ScriptedServer) -> None:
    schema = {"properties": {"a": {"not": {"type": "integer"}, "uniqueItems": True}}}
    strict = schema_format(schema, strict=True)
    got = await server.post(CHAT, messages=user("x"), response_format=strict)
    assert got.status_code == 400
    flat = {"type": "json_schema", "schema": schema, "strict": True}  # of SGLang and llama.cpp
    same = await server.post(CHAT, messages=user("x"), response_format=flat)
    assert same.json() == got.json()
    error = got.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "not, uniqueItems" in error["message"] and "strict false" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_enforced_is_told(server: ScriptedServer, stream: bool) -> None:
    loose = schema_format({"type": "array", "uniqueItems": True})
    got = await server.post(CHAT, messages=user("x"), response_format=loose, stream=stream)
    assert got.status_code == 200
    told = "response_format.json_schema.schema: not enforced: uniqueItems"
    assert got.headers["X-RadixLM-Warning"].startswith(told)
    params = {"json_schema": json.dumps({"not": {"type": "integer"}}), "max_new_tokens": 3}
    got = await server.post("/generate", text="x", sampling_params=params, stream=stream)
    assert got.headers["X-RadixLM-Warning"] == "sampling_params.json_schema: not enforced: not"


@pytest.mark.parametrize("kind", ["json_object", "json"])
async def test_the_schema_of_hugging_faces_clients_is_read(
    server: ScriptedServer, kind: str
) -> None:
    """They send a json_schema in TGI's form."""
    asked = {"type": kind, "value": {"type": "array", "uniqueItems": True}}
    got = await server.post(CHAT, messages=user("x"), response_format=asked)
    assert "not enforced: uniqueItems" in got.headers["X-RadixLM-Warning"]


SCRIPTED = {"same": "[1, 1]", "other": "[1, 2]"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'


@pytest.fixture
async def loose(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    """A server whose model writes what it wants: no grammar holds it."""
    async with scripted_server(toy_folder, {**SCRIPTED, "call": CALL}) as made:
        yield made


def last_choice(text: str) -> dict[str, Any]:
    lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ends = [c for chunk in lines for c in chunk["choices"] if c["finish_reason"]]
    return ends[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", SCRIPTED)
async def test_answers_are_checked_against_what_is_not_enforced(
    loose: ScriptedServer, word: str, stream: bool
) -> None:
    schema = {"type": "array", "uniqueItems": True}
    error = "the answer does not fit: [1, 1] has non-unique elements" if word == "same" else ""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": user(word), "response_format": schema_format(schema)}),
        ("/v1/completions", {"prompt": word, "response_format": schema_format(schema)}),
    ]
    for path, body in bodies:
        got = await loose.post(path, **body, max_tokens=50, stream=stream)
        choice = last_choice(got.text) if stream else got.json()["choices"][0]
        where = "response_format.json_schema.schema"
        assert choice.get("schema_error", "") == (f"{where}: {error}" if error else "")
        told = got.headers["X-RadixLM-Warning"]
        assert told.startswith(f"{where}: not enforced: uniqueItems")
        assert ("choice 0" in told) == (bool(error) and not stream)
    for disjoint in (False, True) if stream else (False,):
        loose.state.config = loose.config.with_values({"stream_output": disjoint})
        params = {"json_schema": json.dumps(schema), "max_new_tokens": 50}
        got = await loose.post("/generate", text=word, sampling_params=params, stream=stream)
        text = got.text.splitlines()[-4][6:] if stream else got.text
        assert error in json.loads(text)["meta_info"].get("schema_error", "")


@pytest.mark.parametrize("strict", [False, True])
async def test_forced_calls_are_checked_too(loose: ScriptedServer, strict: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tool = {"type": "function", "function": function}
    body = {"messages": user("call"), "tools": [tool], "tool_choice": "required"}
    got = await loose.post(CHAT, **body)
    where = "tools[0].function.parameters"
    if strict:
        assert got.status_code == 400 and got.json()["error"]["param"] == where
        return
    choice = got.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["schema_error"].startswith(f"{where}: the answer does not fit: 5 should not")
    assert got.headers["X-RadixLM-Warning"].startswith(f"{where}: not enforced: not; choice 0: ")
    got = await loose.post(CHAT, **body, stream=True)
    assert last_choice(got.text)["schema_error"] == choice["schema_error"]
    mistral = await loose.post(CHAT, **body | {"tool_choice": "any"})
    assert mistral.json()["choices"][0]["schema_error"] == choice["schema_error"]
    auto = await loose.post(CHAT, **body | {"tool_choice": "auto"})
    assert "X-RadixLM-Warning" not in auto.headers


async def test_a_strict_schema_reaches_the_engine_as_strict(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    hooks = server.engine.scheduler.hooks
    monkeypatch.setattr(hooks, "arrive", lambda request: seen.append(request.wire.grammar))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for strict in (True, False):
        form = schema_format(schema, strict=strict)
        got = await server.post(CHAT, messages=user("x"), response_format=form)
        assert got.status_code == 200 and "X-RadixLM-Warning" not in got.headers
        assert seen[-1].is_strict is strict


async def test_tokens_of_a_prediction_are_counted(server: ScriptedServer) -> None:
    text = "Hello there."
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    for content in (text, parts):
        prediction = {"type": "content", "content": content}
        got = await server.post(CHAT, messages=user("hi"), prediction=prediction)
        details = got.json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == len(server.tokenizer.encode(text, False))
        assert details["rejected_prediction_tokens"] == 0
    prediction = {"type": "content", "content": "Quite another text"}
    chunks = await server.events(
        CHAT, messages=user("hi"), prediction=prediction, stream_options={"include_usage": True}
    )
    details = chunks[-1]["usage"]["completion_tokens_details"]
    wanted = len(server.tokenizer.encode("Quite another text", False))
    assert details["rejected_prediction_tokens"] + details["accepted_prediction_tokens"] == wanted
    assert details["accepted_prediction_tokens"] < wanted


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": 3}, "prediction.content"),
    ],
)
async def test_a_prediction_is_a_text(
    server: ScriptedServer, prediction: dict[str, Any], param: str
) -> None:
    got = await server.post(CHAT, messages=user("hi"), prediction=prediction)
    assert got.status_code == 400 and got.json()["error"]["param"] == param


async def test_templates_of_clients_are_for_operators_to_allow(
    server: ScriptedServer, toy_folder: Path
) -> None:
    source = "{% for m in messages %}[{{ m.content }}{{ mark }}]{% endfor %}"
    body: dict[str, Any] = {"messages": user("hi"), "chat_template": source}
    body["chat_template_kwargs"] = {"mark": "!"}
    for path in (CHAT, "/tokenize"):
        refused = await server.post(path, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template"
    async with scripted_server(toy_folder, {}, trust_request_chat_template=True) as made:
        ids = (await made.post("/tokenize", **body)).json()["tokens"]
        assert made.tokenizer.decode(ids, False) == "[hi!]"
        answer = await made.post(CHAT, **body, return_prompt_token_ids=True, max_tokens=1)
        assert answer.json()["choices"][0]["prompt_token_ids"] == ids
        for bad in ("{% for", "{{ ''.__class__ }}", "{% for i in range(10**9) %}{% endfor %}"):
            answer = await made.post(CHAT, messages=user("hi"), chat_template=bad)
            assert answer.status_code == 400, answer.text
