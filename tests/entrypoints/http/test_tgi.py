"""Text Generation Inference's routes: compared with OpenAI's, which compute the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer

from radixlm.intake.records import GenerateRequest

PROMPT = "stop me"


async def events(server: ScriptedServer, path: str, **body: Any) -> list[dict[str, Any]]:
    got = await server.post(path, **body)
    assert got.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[5:]) for line in got.text.splitlines() if line]


async def test_an_answer_and_its_stream_say_what_openai_says(server: ScriptedServer) -> None:
    expected = (await server.post("/v1/completions", prompt=PROMPT, max_tokens=100)).json()
    text = expected["choices"][0]["text"]
    assert (await server.post("/", inputs=PROMPT)).json() == [{"generated_text": text}]
    assert (await server.post("/generate", inputs=PROMPT)).json() == {"generated_text": text}
    full = {"return_full_text": True}
    got = (await server.post("/generate", inputs=PROMPT, parameters=full)).json()
    assert got["generated_text"] == PROMPT + text
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        made = await events(server, path, inputs=PROMPT, **more)
        assert "".join(one["token"]["text"] for one in made if not one["token"]["special"]) == text
        assert [one["index"] for one in made] == list(range(1, len(made) + 1))
        assert [one["generated_text"] for one in made] == [None] * (len(made) - 1) + [text]
        details = made[-1]["details"]
        usage = expected["usage"]
        assert details["generated_tokens"] == len(made) == usage["completion_tokens"]
        assert details["input_length"] == usage["prompt_tokens"]
        assert details["finish_reason"] == "eos_token"


async def test_details_name_every_token(server: ScriptedServer) -> None:
    asked = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "seed": 7}
    details = (await server.post("/generate", inputs=PROMPT, parameters=asked)).json()["details"]
    assert details["seed"] == 7 and details["generated_tokens"] == len(details["tokens"])
    assert all(token["logprob"] <= 0 for token in details["tokens"])
    assert [len(row) for row in details["top_tokens"]] == [2] * len(details["tokens"])
    assert [row["id"] for row in details["prefill"]] == server.tokenizer.encode(PROMPT)
    assert details["prefill"][0]["logprob"] is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [({"max_new_tokens": 2}, "length"), ({"stop": ["STOP"]}, "stop_sequence"), ({}, "eos_token")],
)
async def test_why_it_ended(server: ScriptedServer, asked: dict[str, Any], reason: str) -> None:
    parameters = {"details": True, **asked}
    got = (await server.post("/generate", inputs=PROMPT, parameters=parameters)).json()
    assert got["details"]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("asked", "temperature", "top_k"),
    [
        ({}, 0.0, -1),
        ({"temperature": 1.0, "top_p": 1.0}, 0.0, -1),
        ({"do_sample": True}, 1.0, -1),
        ({"temperature": 0.5}, 0.5, -1),
        ({"top_k": 3}, 1.0, 3),
    ],
)
async def test_when_it_samples(
    server: ScriptedServer,
    asked_for: list[GenerateRequest],
    asked: dict[str, Any],
    temperature: float,
    top_k: int,
) -> None:
    await server.post("/generate", inputs=PROMPT, parameters=asked)
    sampling = asked_for[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (temperature, top_k)


async def test_grammars_and_the_model(
    server: ScriptedServer, asked_for: list[GenerateRequest]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json_schema", "value": {"name": "x", "schema": schema}},
        {"type": "regex", "value": "a+"},
    ):
        asked = {"grammar": grammar, "max_new_tokens": 1}
        assert (await server.post("/", inputs="x", parameters=asked)).status_code == 200
        assert asked_for[-1].grammar is not None
    told = (await server.client.get("/info")).json()
    assert told["max_input_tokens"] == told["max_total_tokens"] - 1 > 0


@pytest.mark.parametrize(
    ("path", "parameters", "param"),
    [
        ("/", {"grammar": {"type": "lark"}}, "grammar"),
        ("/", {"watermark": True}, "watermark"),
        ("/", {"typical_p": 0.5}, "typical_p"),
        ("/generate_stream", {"best_of": 2}, "best_of"),
        ("/generate_stream", {"decoder_input_details": True}, "decoder_input_details"),
    ],
)
async def test_what_is_refused(
    server: ScriptedServer, path: str, parameters: dict[str, Any], param: str
) -> None:
    got = await server.post(path, inputs="x", parameters=parameters)
    assert got.status_code == 400 and got.json()["error"]["param"] == param, got.text
