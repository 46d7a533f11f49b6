"""Custom tools of /v1/chat/completions: their input is a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.http_server import listening, scripted_server

PATCH = 'add "x"\n*** End'
GRAMMAR = {"syntax": "regex", "definition": r"[a-z\n \"*E]+"}
PATCHER = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edit.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
ADDER = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS: Any = [PATCHER, ADDER]
ASK: Any = {"role": "user", "content": "both please"}


def written(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


SCRIPT = {"both please": written("patch", input=PATCH) + "\n" + written("add", a=3)}


async def test_calls_have_the_form_of_their_tools(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server, listening(server) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x")
        async with client:
            got = await client.chat.completions.create(model="tiny", messages=[ASK], tools=TOOLS)
            message: Any = got.choices[0].message
            custom, function = message.tool_calls
            assert (custom.type, custom.custom.name, custom.custom.input) == (
                "custom",
                "patch",
                PATCH,
            )
            assert (function.type, function.function.name) == ("function", "add")
            results: Any = [
                {"role": "tool", "tool_call_id": call.id, "content": "ok"}
                for call in (custom, function)
            ]
            sent_back = message.model_dump(exclude_none=True)
            as_function = json.loads(json.dumps(sent_back))
            arguments = json.dumps({"input": PATCH})
            as_function["tool_calls"][0] = {
                "id": custom.id,
                "type": "function",
                "function": {"name": "patch", "arguments": arguments},
            }
            counts = []
            for assistant in (sent_back, as_function):
                messages = [ASK, assistant, *results]
                after = await client.chat.completions.create(
                    model="tiny", messages=messages, tools=TOOLS, max_tokens=1
                )
                assert after.usage
                counts.append(after.usage.prompt_tokens)
            assert counts[0] == counts[1], "the model reads the call as it wrote it"


async def test_a_stream_sends_the_input_of_a_custom_call(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server:
        got = await server.post("/v1/chat/completions", messages=[ASK], tools=TOOLS, stream=True)
    chunks = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
    parts = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"]["tool_calls"] or ()
    ]
    mine = [part for part in parts if part["index"] == 0]
    assert mine[0]["type"] == "custom" and mine[0]["custom"] == {"name": "patch", "input": ""}
    assert mine[0]["id"] and mine[1:] == [{"index": 0, "custom": {"input": PATCH}}]
    other = [part["function"]["arguments"] for part in parts if part["index"] == 1]
    assert json.loads("".join(other)) == {"a": 3}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "patch"}}],
            },
        },
    ],
)
async def test_a_custom_tool_is_chosen(
    toy_folder: Path, asked_for: list[Any], choice: dict[str, Any]
) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server:
        body = {"messages": [ASK], "tools": TOOLS, "tool_choice": choice}
        await server.post("/v1/chat/completions", **body)
    grammar = asked_for[0].grammar
    assert '"patch' in grammar.value.replace("\\", "") and '"add"' not in grammar.value
    assert "[a-z" in grammar.value, "the input is held to its grammar"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": 3}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": 1}}, "tool_choice.custom"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(server: Any, fields: dict[str, Any], param: str) -> None:
    got = await server.post("/v1/chat/completions", messages=[ASK], **fields)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)
