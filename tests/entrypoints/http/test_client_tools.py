"""Tools of /v1/responses that the client runs, as Codex offers them: custom ones, namespaces, and
OpenAI's own tools, which are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes import toy_tokenizer
from tests.fakes.http_server import listening, scripted_server

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.custom_tools import input_of
from radixlm.entrypoints.http.responses.client_tools import client_tools
from radixlm.entrypoints.http.responses.schemas import messages_of
from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import GrammarSpec
from radixlm.text.token_bytes import Decoder
from radixlm.text.tokenizer import Tokenizer
from radixlm.text.tools import registry as tools
from radixlm.text.tools.base import tool_specs

PATCH = 'add "x"\n*** End'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: LINE+\nLINE: /.*\\n?/"}
TOOLS: Any = [
    {"type": "custom", "name": "patch", "description": "Edit.", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Sub-agents.",
        "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
]


def written(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


SCRIPT = {
    "both please": written("patch", input=PATCH) + "\n" + written("agents__close", id=3),
}


async def test_calls_of_custom_tools_and_namespaces(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server, listening(server) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x")
        async with client:
            raw = await client.responses.with_raw_response.create(
                model="tiny", input="both please", tools=TOOLS
            )
            warning = raw.headers["x-radixlm-warning"]
            assert "tools[2]: web_search" in warning and "tools[3]: local_shell" in warning
            custom, function = raw.parse().output
            assert custom.type == "custom_tool_call" and custom.input == PATCH
            assert (custom.name, custom.id[:4]) == ("patch", "ctc_")  # type: ignore[index]
            assert function.type == "function_call" and json.loads(function.arguments) == {"id": 3}
            assert (function.name, function.namespace) == ("close", "agents")
            results: Any = [
                {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
                {"type": "function_call_output", "call_id": function.call_id, "output": "closed"},
            ]
            whole: Any = [item.model_dump(exclude_none=True) for item in (custom, function)]
            first: Any = {"role": "user", "content": "both please"}
            by_text = await client.responses.create(model="tiny", input=[first, *whole, *results])
            by_id = await client.responses.create(
                model="tiny", input=results, previous_response_id=raw.parse().id
            )
            assert by_text.usage and by_id.usage
            assert by_text.usage.input_tokens == by_id.usage.input_tokens


async def test_the_events_of_a_custom_call(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server, listening(server) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x")
        async with client:
            ask = client.responses.stream(model="tiny", input="both please", tools=TOOLS)
            async with ask as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
    mine = [e for e in events if getattr(e, "output_index", None) == 0]
    assert [e.type for e in mine] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert mine[1].delta == mine[2].input == PATCH  # type: ignore[union-attr]
    assert final.output[0] == mine[3].item  # type: ignore[union-attr]


async def test_tools_may_come_with_the_input(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, SCRIPT) as server:
        added = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
        asked = [added, {"role": "user", "content": "both please"}]
        got = (await server.post("/v1/responses", input=asked)).json()
        assert [item["type"] for item in got["output"]] == ["custom_tool_call", "function_call"]
        wrong = [added | {"tools": "x"}, asked[1]]
        refused = await server.post("/v1/responses", input=wrong)
        assert refused.json()["error"]["param"] == "input[0].tools"


def test_an_image_may_be_a_tools_result() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    (message,) = messages_of([result])
    assert message["content"] == [{"type": "image_url", "image_url": {"url": image["image_url"]}}]


LINES = 'start: (KEY "=" /.*/ LF)+\nKEY: /[a-z\\/]+/\n%import common.LF'


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [
        ("regex", "[ab]|^c$", ["a", "b", "c"], ["d", "ab", ""]),
        ("lark", LINES, ["a=1\n", 'a/b="\\u"\nc=\n'], ["a=1", "a\n", "", 'a="\r\n\n']),
    ],
)
def test_a_grammar_holds_the_input(
    choice: str, syntax: str, definition: str, good: list[str], bad: list[str]
) -> None:
    """Of a call that the model begins, and of one that is asked for."""
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    (made,) = client_tools([{"type": "custom", "name": "patch", "format": grammar}])
    assert f"({syntax}):\n{definition}" in made.function["function"]["description"]
    found = tools.constraint("hermes", tool_specs([made.function]), choice)
    assert found is not None
    coder = toy_tokenizer.byte_level()
    tokenizer = Tokenizer(coder, Decoder.from_json(coder.decoder.__getstate__()), {}, {})
    backend = create_backend("llguidance", tokenizer, [0], tokenizer.vocab_size)
    assert backend is not None
    compiled = backend.compile(GrammarSpec(found["kind"], found["value"], is_strict=True))

    def accepts(text: str) -> bool:
        matcher = compiled.matcher()
        ids = tokenizer.encode(written("patch", input=text), add_special_tokens=False)
        return all(matcher.accept(token) for token in ids)

    assert [text for text in good + bad if accepts(text)] == good


async def test_a_grammar_that_is_not_held_is_told(toy_folder: Path) -> None:
    nested = {**GRAMMAR, "definition": 'start: "(" start ")" | "x"'}
    async with scripted_server(toy_folder, SCRIPT) as server:
        for format_, told in ((GRAMMAR, False), (nested, True)):
            tool = {"type": "custom", "name": "patch", "format": format_}
            got = await server.post("/v1/responses", input="both please", tools=[tool])
            assert ("tools[0].format" in got.headers.get("x-radixlm-warning", "")) == told


def test_the_model_reads_functions() -> None:
    patch, close = client_tools(TOOLS)
    function = patch.function["function"]
    assert "(lark):\nstart: LINE+" in function["description"]
    assert function["parameters"]["required"] == ["input"]
    assert close.function["function"]["name"] == "agents__close"
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": PATCH}
    (message,) = messages_of([call])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert input_of(arguments) == PATCH
    assert input_of('{"other": 1}') == '{"other": 1}', "nothing that the model wrote is lost"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "magic"}, "tools[0].type"),
        ({"type": "custom"}, "tools[0].name"),
        ({"type": "custom", "name": "f", "format": "text"}, "tools[0].format"),
        (
            {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}},
            "tools[0].format.definition",
        ),
        ({"type": "namespace", "tools": []}, "tools[0].name"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}, "tools[0].tools[0].type"),
    ],
)
def test_a_bad_tool_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client_tools([tool])
    assert refused.value.param == param
