"""What the playground asks for: bytes of tokens, and parsers chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer

MESSAGE = (
    'I <think>will</think> add. <tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>!'
)


async def test_the_bytes_of_tokens_join_to_the_text(server: ScriptedServer) -> None:
    text = "Grüße 😀 <|im_end|> x"
    flags = {"return_token_bytes": True, "return_token_strs": True, "add_special_tokens": False}
    got = (await server.post("/tokenize", prompt=text, **flags)).json()
    assert b"".join(map(bytes.fromhex, got["token_bytes"])).decode() == text
    special = {i for i, flag in zip(got["tokens"], got["special_tokens_mask"], strict=True) if flag}
    assert special == {server.tokenizer.token_id("<|im_end|>")}
    assert len(got["token_strs"]) == got["count"] and "<|im_end|>" in got["token_strs"]
    rows = (await server.post("/tokenize", prompt=["ab", text], **flags)).json()
    assert rows["token_bytes"][1] == got["token_bytes"]
    plain = (await server.post("/tokenize", prompt=text)).json()
    assert not {"token_bytes", "token_strs", "special_tokens_mask"} & set(plain)


@pytest.mark.parametrize("size", [1, 3, 7, 500])
async def test_steps_join_to_the_whole(server: ScriptedServer, size: int) -> None:
    body: dict[str, Any] = {"text": MESSAGE, "tool_call_parser": "hermes"}
    body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    whole = (await server.post("/parse_function_call", **body)).json()
    got = (await server.post("/parse_function_call", **body, chunk_chars=size)).json()
    steps = got.pop("steps")
    assert got == whole | {"tool_call_parser": "hermes"}
    assert "".join(step["chunk"] for step in steps) == MESSAGE and steps[-1]["chunk"] == ""
    assert "".join(step["normal_text"] for step in steps) == whole["normal_text"]
    arguments = "".join(call["parameters"] for step in steps for call in step["calls"])
    assert json.loads(arguments) == {"a": "ü"}
    split = {"text": MESSAGE, "reasoning_parser": "qwen3"}
    whole = (await server.post("/separate_reasoning", **split)).json()
    got = (await server.post("/separate_reasoning", **split, chunk_chars=size)).json()
    assert "".join(step["reasoning_text"] for step in got["steps"]) == whole["reasoning_text"]
    assert "".join(step["text"] for step in got["steps"]) == whole["text"]


async def test_too_many_chunks(server: ScriptedServer) -> None:
    got = await server.post("/separate_reasoning", text="x" * 9000, chunk_chars=2)
    error = got.json()["error"]
    assert (
        got.status_code == 400 and error["param"] == "chunk_chars" and "3 works" in error["message"]
    )
    empty = await server.post("/separate_reasoning", text="", chunk_chars=2)
    assert empty.json()["text"] == "" and len(empty.json()["steps"]) == 1
