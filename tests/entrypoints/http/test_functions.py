"""OpenAI's older form of tools in /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.entrypoints.http.test_chat import ADD, CHAT, user
from tests.fakes.http_server import ScriptedServer

FUNCTIONS = {"functions": [ADD["function"]]}


async def test_a_call_comes_in_the_older_form(server: ScriptedServer) -> None:
    answer = await server.post(CHAT, messages=user("sum please"), **FUNCTIONS)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert message["content"] == "I will add." and message["tool_calls"] is None
    assert message["function_call"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}


async def test_deltas_come_in_the_older_form(server: ScriptedServer) -> None:
    chunks = await server.events(CHAT, messages=user("two calls"), **FUNCTIONS)
    choices = [chunk["choices"][0] for chunk in chunks]
    parts = [c["delta"]["function_call"] for c in choices if c["delta"]["function_call"]]
    assert [part["name"] for part in parts if "name" in part] == ["add"]  # the first call only
    assert json.loads("".join(part["arguments"] for part in parts)) == {"a": 1, "b": 2}
    assert all(choice["delta"]["tool_calls"] is None for choice in choices)
    assert choices[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("choice", "newer"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ({"name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_the_choice_is_that_of_tools(server: ScriptedServer, choice: Any, newer: Any) -> None:
    body: dict[str, Any] = {"messages": user("sum please")}
    older = await server.post(CHAT, **body, **FUNCTIONS, function_call=choice)
    same = await server.post(CHAT, **body, tools=[ADD], tool_choice=newer)
    first, second = (got.json()["choices"][0]["message"] for got in (older, same))
    assert first["content"] == second["content"]
    assert bool(first["function_call"]) == bool(second["tool_calls"])
    assert older.json()["usage"]["prompt_tokens"] == same.json()["usage"]["prompt_tokens"]


async def test_earlier_calls_are_read(server: ScriptedServer) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    begin = user("sum please")
    older = [
        *begin,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "add", "content": "3"},
    ]
    made = {"id": "call00001", "type": "function", "function": call}
    newer = [
        *begin,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"},
    ]
    ids = []
    for messages in (older, newer):
        ids.append((await server.post("/tokenize", messages=messages)).json()["tokens"])
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"function_call": {"name": "add"}}, "function_call", "needs functions"),
        ({**FUNCTIONS, "tools": [ADD]}, "functions", "either functions or tools"),
        ({**FUNCTIONS, "function_call": "must"}, "function_call", '"none", "auto"'),
        ({**FUNCTIONS, "function_call": {"name": "sub"}}, "function_call", "'sub'"),
        ({"functions": [{}]}, "functions", "functions[0] has no function name"),
        (
            {"functions": [{"name": "f", "parameters": 1}]},
            "functions",
            "functions[0] (f): parameters must be an object",
        ),
    ],
)
async def test_errors_name_the_older_fields(
    server: ScriptedServer, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await server.post(CHAT, messages=user("hi"), **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"] and "tool_choice" not in error["message"]


async def test_a_call_that_is_no_object_is_refused(server: ScriptedServer) -> None:
    messages = [*user("hi"), {"role": "assistant", "function_call": "add"}]
    answer = await server.post(CHAT, messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].function_call"
