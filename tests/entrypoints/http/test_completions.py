"""/v1/completions: four kinds of prompts, echo, log-probabilities, samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer, scripted_server

PATH = "/v1/completions"


async def test_prompts_of_four_kinds(server: ScriptedServer) -> None:
    ids = server.tokenizer.encode("hi")
    for prompt, count in (("hi", 1), (["hi", "hi"], 2), (ids, 1), ([ids, ids, ids], 3)):
        got = (await server.post(PATH, prompt=prompt)).json()
        assert got["object"] == "text_completion" and got["id"].startswith("cmpl-")
        assert [choice["index"] for choice in got["choices"]] == list(range(count))
        assert all(choice["text"] == "Hello there." for choice in got["choices"])
        assert got["usage"]["prompt_tokens"] == count * len(ids)


async def test_sixteen_tokens_unless_asked(server: ScriptedServer) -> None:
    got = (await server.post(PATH, prompt="forever")).json()
    assert got["usage"]["completion_tokens"] == 16
    assert got["choices"][0]["finish_reason"] == "length"


async def test_echo_with_logprobs_covers_the_prompt(server: ScriptedServer) -> None:
    got = (await server.post(PATH, prompt="stop me", echo=True, logprobs=2, max_tokens=3)).json()
    choice, num_prompt = got["choices"][0], got["usage"]["prompt_tokens"]
    assert choice["text"].startswith("stop me")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == num_prompt + 3
    assert "".join(logprobs["tokens"][:num_prompt]) == "stop me"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert all(len(row) == 2 for row in logprobs["top_logprobs"][1:])


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1, "echo": True}, {"n": 2}])
async def test_a_stream_says_what_the_whole_answer_says(
    server: ScriptedServer, extra: dict[str, Any]
) -> None:
    body = {"prompt": ["hi", "grüße"], "max_tokens": 30} | extra
    whole = (await server.post(PATH, **body)).json()
    chunks = await server.events(PATH, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1]]
        mine = [c for c in mine if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        if choice["logprobs"]:
            for key in ("tokens", "text_offset", "token_logprobs"):
                parts = [entry for c in mine for entry in c["logprobs"][key]]
                assert parts == choice["logprobs"][key]


async def test_continuous_usage(server: ScriptedServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await server.events(PATH, prompt="hi", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == chunks[-1]["usage"]["completion_tokens"]


async def test_best_of_computes_more_than_it_shows(server: ScriptedServer) -> None:
    got = (await server.post(PATH, prompt="hi", best_of=3, n=1)).json()
    one = (await server.post(PATH, prompt="hi")).json()
    assert len(got["choices"]) == 1
    assert got["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


async def test_prompts_are_cut_on_either_side(server: ScriptedServer) -> None:
    ids = [5, 6, 7, 8]
    for side, kept in (("left", ids[2:]), ("right", ids[:2]), (None, ids[2:])):
        body = {"prompt": ids, "truncate_prompt_tokens": 2, "truncation_side": side}
        got = (await server.post(PATH, **body, return_token_ids=True)).json()
        assert got["choices"][0]["prompt_token_ids"] == kept


async def test_mistrals_route_says_what_completions_say(toy_folder: Any) -> None:
    texts = {"prompt": "a", "suffix": "b", "random_seed": 7}
    async with scripted_server(
        toy_folder, {"<fim_middle>": "mid"}, completion_template="star_coder"
    ) as made:
        (choice,) = (got := (await made.post("/v1/fim/completions", **texts)).json())["choices"]
        assert got["object"] == "chat.completion" and choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "mid" and got["usage"]["completion_tokens"] > 0
        chunks = await made.events("/v1/fim/completions", **texts)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * len(deltas[1:])
        assert "".join(delta["content"] for delta in deltas) == "mid"
        assert chunks[-1]["usage"] == got["usage"]
        cut = (await made.post("/v1/fim/completions", **texts, max_tokens=1)).json()
        assert cut["choices"][0]["finish_reason"] == "length"
    async with scripted_server(toy_folder, {}) as made:
        refused = await made.post("/v1/fim/completions", **texts)
        assert refused.json()["error"]["param"] == "suffix"


async def test_suffix_needs_a_template(server: ScriptedServer, toy_folder: Any) -> None:
    refused = await server.post(PATH, prompt="a", suffix="b")
    assert refused.json()["error"]["param"] == "suffix"
    async with scripted_server(
        toy_folder, {"<fim_middle>": "mid"}, completion_template="star_coder"
    ) as made:
        got = await made.post(PATH, prompt="a", suffix="b")
        assert got.json()["choices"][0]["text"] == "mid"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-4]}, "prompt"),
        ({"prompt": [99999999], "echo": True}, "prompt"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"prompt": "a", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "a", "n": 5000}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 0, "best_of": 2}, "n"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "rid": ["x", "y"]}, "rid"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": "a", "logit_processor": "x"}, "custom_logit_processor"),
    ],
)
async def test_a_bad_field_is_named(
    server: ScriptedServer, body: dict[str, Any], param: str
) -> None:
    got = await server.post(PATH, **body)
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == param


async def test_a_message_names_both_limits_of_tokens_as_the_client(server: ScriptedServer) -> None:
    got = await server.post(PATH, prompt="hi", max_tokens=2, min_tokens=5)
    assert got.json()["error"]["message"] == "min_tokens (5) must not exceed max_tokens (2)"


async def test_a_field_of_several_types_is_judged_by_the_type_it_has(
    server: ScriptedServer,
) -> None:
    got = await server.post(PATH, prompt="hi", stop=["x"] * 2000)
    assert "at most 1024 items" in got.json()["error"]["message"]
    assert got.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streams_carry_the_ids_of_the_prompt_once(server: ScriptedServer, path: str) -> None:
    """``return_token_ids``, as vLLM streams it: completions in the choice, chat beside it."""
    is_chat = path == "/v1/chat/completions"
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    body = prompt | {"return_token_ids": True}
    whole = (await server.post(path, **body)).json()
    expected = whole["choices"][0]["prompt_token_ids"]
    assert expected and whole.get("prompt_token_ids") == (expected if is_chat else None)
    streamed = await server.post(path, stream=True, **body)
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    holders = chunks if is_chat else [chunk["choices"][0] for chunk in chunks]
    assert [one.get("prompt_token_ids") for one in holders] == [
        expected if place == 0 else None for place in range(len(holders))
    ]
