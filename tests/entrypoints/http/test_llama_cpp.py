"""llama.cpp's routes: compared with OpenAI's, which compute the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.http_server import ScriptedServer, scripted_server


async def test_a_completion_and_its_stream_say_what_openai_says(server: ScriptedServer) -> None:
    expected = (await server.post("/v1/completions", prompt="stop me", max_tokens=99)).json()
    got = (await server.post("/completion", prompt="stop me")).json()
    assert got["content"] == expected["choices"][0]["text"]
    assert got["stop"] and got["stop_type"] == "eos" and got["tokens"] == []
    usage = expected["usage"]
    assert got["tokens_predicted"] == usage["completion_tokens"]
    assert got["tokens_evaluated"] == usage["prompt_tokens"]
    streamed = await server.post("/completion", prompt="stop me", stream=True)
    pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
    assert "".join(one["content"] for one in pieces) == got["content"]
    assert [one["stop"] for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len([i for one in pieces for i in one["tokens"]]) == pieces[-1]["tokens_predicted"]


async def test_why_a_completion_stopped(server: ScriptedServer) -> None:
    cut = (await server.post("/completion", prompt="stop me", n_predict=2)).json()
    assert cut["stop_type"] == "limit" and cut["timings"]["predicted_n"] == 2
    word = (await server.post("/completion", prompt="stop me", stop=["STOP"])).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", "STOP")
    assert word["content"].strip() == "one two"
    several = (await server.post("/completion", prompt=["a", "b"], return_tokens=True)).json()
    assert len(several) == 2 and all(one["tokens"] for one in several)
    refused = await server.post("/completion", prompt=["a", "b"], stream=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


async def test_infill_needs_a_template_for_code(toy_folder: Path) -> None:
    texts = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "return 1", "n_predict": 4}
    async with scripted_server(toy_folder, {}) as made:
        refused = await made.post("/infill", **texts)
        assert refused.status_code == 400 and "--completion-template" in refused.text
    async with scripted_server(toy_folder, {}, completion_template="qwen_coder") as made:
        got = (await made.post("/infill", **texts)).json()
        filled = {"prompt": "def f(", "suffix": "return 1", "max_tokens": 4}
        expected = (await made.post("/v1/completions", **filled)).json()
        assert got["content"] == expected["choices"][0]["text"]
        assert got["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
        ollama = {"model": "tiny", "stream": False, "options": {"num_predict": 4}}
        same = await made.post("/api/generate", prompt="def f(", suffix="return 1", **ollama)
        assert same.json()["response"] == got["content"]
        assert same.json()["prompt_eval_count"] == got["tokens_evaluated"]


async def test_templates_pieces_and_properties(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = (await server.post("/apply-template", messages=messages)).json()["prompt"]
    ids = (await server.post("/tokenize", messages=messages)).json()["tokens"]
    plain = (await server.post("/tokenize", content=prompt)).json()["tokens"]
    assert plain == ids
    counted = await server.post("/v1/chat/completions/input_tokens", messages=messages)
    assert counted.json()["input_tokens"] == len(ids)
    pieces = (await server.post("/tokenize", content="hi there", with_pieces=True)).json()["tokens"]
    assert "".join(one["piece"] for one in pieces) == "hi there"
    back = await server.post("/detokenize", tokens=[one["id"] for one in pieces])
    assert back.json()["content"] == "hi there"
    props = (await server.client.get("/props")).json()
    assert props["model_alias"] == "tiny" and props["chat_template"]
    slots = (await server.client.get("/slots")).json()
    assert len(slots) == props["total_slots"] and not any(one["is_processing"] for one in slots)
    assert (await server.client.get("/lora-adapters")).json() == []


async def test_openai_without_its_version(server: ScriptedServer) -> None:
    short = await server.post("/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert short.json()["object"] == "chat.completion"
    assert (await server.client.get("/models")).json()["object"] == "list"
    assert (await server.client.get("/completions")).status_code == 405
