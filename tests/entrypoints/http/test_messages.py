"""Anthropic's messages: a stream has the texts and calls of the whole answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
from tests.fakes.http_server import scripted_server

from radixlm.entrypoints.http.anthropic_answer import _Blocks
from radixlm.text.tools.base import ToolCallDelta

from .conftest import CALL

BROKEN = "<tool_call>\n</tool_call>"  # it stays text
SCRIPT = {
    "case 0": f"\n\nI will add. \n{CALL}\n",
    "case 1": f"I add\n{BROKEN}{CALL}\n\n{BROKEN} \n{CALL}\n \n",
    "case 2": f"{CALL}\n {BROKEN}\n\nAnd so on. \n",
    "case 3": f"\n {BROKEN} \n\n{BROKEN}\n \n",
    "case 4": " Only text.\n\nMore of it. \n\n",
    "case 5": " \n",
}
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


def facts(content: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    """The text, and the calls."""
    text = "".join(block.get("text", "") for block in content)
    return text, [block["input"] for block in content if block["type"] == "tool_use"]


def streamed(data: str) -> list[dict[str, Any]]:
    """The blocks of a stream's events."""
    blocks: list[dict[str, Any]] = []
    for line in data.split("\n"):
        event = orjson.loads(line[6:]) if line.startswith("data: ") else {"type": ""}
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "text_delta":
                assert delta["text"]
                blocks[-1]["text"] += delta["text"]
            else:
                blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
    for block in blocks:
        if "json" in block:
            block["input"] = orjson.loads(block.pop("json"))
    return blocks


async def test_streams_have_the_white_space_of_whole_answers(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, SCRIPT, tool_call_parser="hermes") as server:
        for case, script in SCRIPT.items():
            for tools in ([], [TOOL]):
                body = {
                    "messages": [{"role": "user", "content": case}],
                    "max_tokens": 300,
                    "tools": tools,
                }
                whole = (await server.post("/v1/messages", **body)).json()
                stream = (await server.post("/v1/messages", stream=True, **body)).text
                found = facts(whole["content"])
                assert facts(streamed(stream)) == found, (case, bool(tools))
                if not found[1] and script.strip():
                    assert found[0] == script


def test_the_end_of_a_call_stands_before_the_text_that_came_with_it() -> None:
    """A delta says what text and which calls came, not in which order."""
    session: Any = SimpleNamespace(call_id=lambda name, index: f"{name}{index}")
    blocks = _Blocks(session)
    deltas: list[tuple[str, list[ToolCallDelta]]] = [
        ("I add. ", [ToolCallDelta(0, "add", '{"a": 1')]),
        ("Then more.", [ToolCallDelta(0, None, "}"), ToolCallDelta(1, "add", '{"a"')]),
        ("", [ToolCallDelta(1, None, ": 2}")]),
    ]
    stream = b""
    for text, calls in deltas:
        parsed: Any = SimpleNamespace(reasoning="", text=text, calls=calls)
        stream += b"".join(
            blocks.events(cast(Any, SimpleNamespace(parsed=parsed, finish_reason=None)))
        )
    found = streamed(stream.decode())
    assert facts(found) == ("I add. Then more.", [{"a": 1}, {"a": 2}])
    assert [one["type"] for one in found] == ["text", "tool_use", "text", "tool_use"]
