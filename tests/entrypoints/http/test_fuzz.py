"""Any request gets an answer or a 4xx soon, and the server keeps running."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.http_server import ScriptedServer, scripted_server

NUM_CALLS = 25
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, 1e308, -1e308, 2**63 - 1, -(2**63), 2**64 - 1, ""),
    *(
        "x",
        "\x00",
        "😀",
        "x" * 70_000,
        "../../etc/passwd",
        "{{ 7 * 7 }}",
        "((((",
        "tiny",
        "default",
    ),
    *([], [None], [1], ["a"], [[1]], [{}], {}, {"a": 1}, {"type": "function"}, {"type": "text"}),
    *([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": None}]),
    *([{"role": "tool", "content": [{"type": "text", "text": 5}]}], {"id": "x"}, [-1], [2**40]),
    *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],),
    *([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}], ["a"] * 3000),
    *([{"type": "function", "function": {"name": "\n", "parameters": []}}], {"include_usage": 1}),
    *({"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, {"type": "json_object"}),
]
VALID: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "tiny", "prompt": "hi", "options": {"num_predict": 3}},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/encode": {"text": "hi"},
    "/parse_function_call": {"text": "hi", "tools": []},
    "/separate_reasoning": {"text": "hi"},
    "/grammar/check": {"type": "regex", "value": "a"},
    "/grammar/trace": {"type": "regex", "value": "a", "text": "a"},
    "/open_session": {},
    "/close_session": {"session_id": "x"},
    "/abort_request": {"rid": "x"},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/completions"},
    "/vertex_generate": {"instances": [{"text": "hi"}]},
    "/configure_logging": {},
    "/set_internal_state": {"server_args": {}},
    "/update_weight_version": {"new_version": "x"},
    "/get_weights_by_name": {"name": "x"},
}
# routes that end other requests or wait by design
LEFT_OUT = frozenset(("abort_all", "timeout", "forward_sleep_time", "background"))


def fields_of(server: ScriptedServer, path: str) -> list[str]:
    """Fields of a route in the OpenAPI document."""
    document = server.app.openapi()
    content = document["paths"][path]["post"].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rpartition("/")[2]
    found = document["components"]["schemas"].get(name, schema)
    return sorted({*found.get("properties", {}), *VALID[path], "unknown"} - LEFT_OUT)


@pytest.mark.parametrize("path", sorted(VALID))
async def test_no_field_can_bring_the_server_down(
    toy_folder: Path, tmp_path: Path, path: str
) -> None:
    rng = random.Random(path)
    headers = {"content-type": "application/json"}
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        fields = fields_of(server, path)
        for _ in range(NUM_CALLS):
            body = dict(VALID[path])
            for name in rng.sample(fields, min(len(fields), rng.choice((1, 1, 2)))):
                body[name] = rng.choice(JUNK)
            got = await server.client.post(path, content=orjson.dumps(body), headers=headers)
            shown = (body, got.text[:300])
            assert got.status_code < 500, shown
            if 400 <= got.status_code < 500:
                assert got.json()["error"], shown
        assert not server.engine.intake.requests
        assert (await server.client.get("/health_generate")).status_code == 200


async def test_nested_junk_in_messages(server: ScriptedServer) -> None:
    rng = random.Random(5)
    keys = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", "type")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/tokenize"):
        field = "input" if path == "/v1/responses" else "messages"
        for _ in range(NUM_CALLS):
            message: dict[str, Any] = {"role": rng.choice(("user", "assistant", "tool", "system"))}
            message["content"] = "x"
            for key in rng.sample(keys, 2):
                message[key] = rng.choice(JUNK)
            body = {field: [message], "model": "tiny", "stream": False}
            if path == "/v1/messages":
                body["max_tokens"] = 2
            if path == "/tokenize":
                del body["stream"]
            got = await server.client.post(
                path, content=orjson.dumps(body), headers={"content-type": "application/json"}
            )
            assert got.status_code < 500, (path, message, got.text[:300])


LONG = 10**30
HI = {"role": "user", "content": "hi"}
# path -> bodies with one nested value of a wrong type, and the field that the answer names
WRONG_INSIDE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/generate": [({"text": ["a", "b"], "token_ids_logprob": [-1, [2]]}, "token_ids_logprob")],
    "/v1/chat/completions": [
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}, "type"),
    ],
    "/parse_function_call": [
        ({"text": "a", "tools": [{"type": "function", "function": 1}]}, "tools")
    ],
    "/v1/completions": [({"prompt": "a", "best_of": 9999}, "best_of must be")],
    "/v1/fim/completions": [({"prompt": "a", "random_seed": LONG}, "random_seed must be")],
    "/api/chat": [
        ({"model": "tiny", "messages": [HI | {"images": 5}]}, "messages[0].images"),
        ({"model": "tiny", "messages": [HI, HI | {"images": ["x"]}]}, "messages[1].images[0]"),
    ],
    "/api/generate": [({"model": "tiny", "prompt": "a", "images": ["x"]}, '"images[0]')],
    "/v1/messages": [
        ({"messages": [HI], "max_tokens": 1, "output_format": {"type": "x"}}, "output_format.type"),
    ],
    "/v1/responses": [
        ({"input": "hi", "tools": [{"type": ["mcp"], "name": "f"}]}, "tools[0].type"),
        ({"input": "hi", "tool_choice": {"type": {"mcp": 1}, "name": "f"}}, "tool_choice"),
        ({"input": "hi", "max_tool_calls": LONG}, "max_tool_calls"),
        ({"input": "hi", "reasoning": {"summary": LONG}}, "reasoning.summary"),
    ],
    "/v1/conversations": [({"items": [HI | {"x": LONG}]}, "items[0].x")],
    "/v1/messages/batches": [
        ({"requests": [{"custom_id": "a", "params": {"x": [LONG]}}]}, "requests[0].params.x[0]"),
    ],
}


async def test_a_nested_value_of_a_wrong_type_is_named(toy_folder: Path, tmp_path: Path) -> None:
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        for path, bodies in WRONG_INSIDE.items():
            for body, name in bodies:
                got = await server.client.post(path, json=body)
                assert got.status_code == 400 and name in got.text, (path, body, got.text[:300])
        schema = {"type": "integer", "maximum": LONG}
        checked = await server.post("/grammar/check", type="json_schema", value=schema)
        assert checked.json()["ok"]


async def test_without_a_tokenizer_ids_work_and_texts_are_refused(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, skip_tokenizer_init=True) as server:
        got = (await server.post("/generate", input_ids=[1, 2, 3])).json()
        assert "text" not in got and got["output_ids"]
        ids = await server.post("/v1/completions", prompt=[1, 2], return_token_ids=True)
        assert ids.json()["choices"][0]["token_ids"]
        for path, body in VALID.items():
            answer = await server.post(path, **body)
            assert answer.status_code < 500, (path, answer.text)
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"):
            refused = await server.post(path, **VALID[path])
            assert refused.status_code == 400 and "tokenizer" in refused.text, path
