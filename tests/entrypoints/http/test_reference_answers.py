"""Answers and errors in the forms that clients of SGLang, vLLM and lm-eval expect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes.http_server import CONTEXT, ScriptedServer, scripted_server

from radixlm.base.errors import QueueFull

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
LONG = {"text": "hi", "sampling_params": {"max_new_tokens": 9999}}


async def test_an_error_has_both_forms(server: ScriptedServer) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a", "n": 0}), ("/generate", {"text": 5})):
        got = (await server.post(path, **body)).json()
        nested = got["error"]
        assert (got["object"], got["code"], got["type"]) == ("error", 400, "BadRequestError")
        assert (got["message"], got["param"]) == (nested["message"], nested["param"])
        assert nested["type"] == "invalid_request_error"
    assert "object" not in (await server.post("/v1/messages")).json()
    assert set((await server.post("/api/chat")).json()) == {"error"}


async def test_length_errors_have_the_references_words(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, messages=[{"role": "user", "content": "word " * 5000}])).json()
    words = f"is longer than the model's context length ({CONTEXT} tokens)."
    assert got["message"].startswith("The input (") and words in got["message"]
    assert got["error"]["code"] == "context_length_exceeded"
    long = {"role": "user", "content": "word " * 500_000}
    for messages in ([long], USER * (CONTEXT + 1)):  # refused before they are tokenized
        error = (await server.post(CHAT, messages=messages)).json()["error"]
        assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    for path, body, param in (
        (CHAT, {"messages": USER, "max_tokens": 9999}, "max_tokens"),
        ("/generate", LONG, "max_new_tokens"),
    ):
        error = (await server.post(path, **body)).json()["error"]
        assert error["message"].startswith("max_completion_tokens is too large: 9999.")
        assert "Requested token count exceeds the model's maximum context" in error["message"]
        assert error["param"] == param and f"ask {param} for" in error["message"]


async def test_max_tokens_is_lowered_where_the_client_has_no_choice(
    server: ScriptedServer, toy_folder: Path
) -> None:
    claude = {"model": "m", "max_tokens": 9999, "messages": USER}
    assert (await server.post("/v1/messages", **claude)).status_code == 200
    llama = {"model": "m", "messages": USER, "options": {"num_predict": 9999}}
    assert (await server.post("/api/chat", **llama)).status_code == 200
    assert (await server.post("/generate", **LONG)).status_code == 400
    async with scripted_server(toy_folder, SCRIPT, clamp_max_tokens=True) as made:
        made.engine.intake.facts = made.engine.intake.facts.__class__(
            **{**_values(made.engine.intake.facts), "clamp_max_tokens": True}
        )
        assert (await made.post("/generate", **LONG)).status_code == 200


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__annotations__}


@pytest.mark.parametrize("status", [503, 429])
async def test_a_full_queue(toy_folder: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_server(toy_folder, SCRIPT, queue_full_status=status) as made:
        full = QueueFull("The request queue is full: 1 waits.", retry_after_s=2.0)
        monkeypatch.setattr(made.engine.scheduler, "_why_refused", lambda request: full)
        for path, body, expected in (
            ("/generate", {"text": "a"}, 503),
            ("/generate", {"text": "a", "stream": True}, 503),
            (CHAT, {"messages": USER}, status),
            (CHAT, {"messages": USER, "stream": True}, status),
            ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": USER}, status),
        ):
            got = await made.post(path, **body)
            assert got.status_code == expected, path
            assert got.headers["retry-after"] == "2" and "queue is full" in got.text
            assert got.json()["error"]["code"] == "queue_full"


async def test_the_request_id_is_in_answers(server: ScriptedServer) -> None:
    async def post(path: str, **body: Any) -> tuple[str, Any]:
        got = await server.client.post(path, json=body, headers={"x-request-id": "abc"})
        return got.headers["x-request-id"], got.json()

    name, got = await post("/generate", text="hi")
    assert name == got["meta_info"]["id"] == "abc"
    name, got = await post("/generate", text=["hi", "ho"])
    assert [one["meta_info"]["id"] for one in got] == ["abc_0", "abc_1"]
    name, got = await post(CHAT, messages=USER)
    assert got["id"] == "chatcmpl-abc"
    name, got = await post(COMPLETIONS, prompt=["a", "b"])
    assert got["id"] == "cmpl-abc"
    name, got = await post(CHAT, messages=USER, rid="mine")
    assert got["id"] == "mine"
    own = await server.post("/generate", text="hi")
    assert own.json()["meta_info"]["id"] == own.headers["x-request-id"]


async def test_a_request_id_that_is_in_use_gets_an_ending(server: ScriptedServer) -> None:
    async def post() -> str:
        got = await server.client.post(
            "/generate", json={"text": "hi"}, headers={"x-request-id": "same"}
        )
        assert got.status_code == 200, got.text
        return str(got.json()["meta_info"]["id"])

    names = await asyncio.gather(*(post() for _ in range(8)))
    assert "same" in names and len(set(names)) == 8


async def test_completions_logprobs_0_has_an_entry_a_token(server: ScriptedServer) -> None:
    got = (await server.post(COMPLETIONS, prompt="hi", logprobs=0)).json()
    logprobs, count = got["choices"][0]["logprobs"], got["usage"]["completion_tokens"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == count
    for token, row in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert row == {token: -0.5}


async def test_vllms_log_probabilities_of_named_tokens(server: ScriptedServer) -> None:
    """The chosen token, and each that the request named, in the place of the likeliest."""
    named = {"logprob_token_ids": [7, 9, 7], "return_tokens_as_token_ids": True}
    body: dict[str, Any] = {"prompt": "hi", "logprobs": 0, "max_tokens": 3} | named
    got = (await server.post(COMPLETIONS, **body)).json()["choices"][0]["logprobs"]
    assert [list(row) for row in got["top_logprobs"]] == [
        [token, "token_id:7", "token_id:9"] for token in got["tokens"]
    ]
    assert [list(row.values()) for row in got["top_logprobs"]] == [[-0.5, -7.0, -9.0]] * 3
    chat: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    chat |= named
    whole = (await server.post(CHAT, **chat)).json()["choices"][0]["logprobs"]["content"]
    for entry in whole:
        rows = [(row["token"], row["logprob"]) for row in entry["top_logprobs"]]
        assert rows == [(entry["token"], -0.5), ("token_id:7", -7.0), ("token_id:9", -9.0)]
    chosen = int(whole[0]["token"].removeprefix("token_id:"))
    parts = await server.events(CHAT, **chat | {"logprob_token_ids": [chosen]})
    entries = [
        e for p in parts for e in (p["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole]
    assert len(entries[0]["top_logprobs"]) == 1 and len(entries[1]["top_logprobs"]) == 2
    for path, wrong in (
        (CHAT, {"messages": USER, "logprob_token_ids": [7]}),
        (CHAT, chat | {"prompt_logprobs": 0}),
        (CHAT, chat | {"logprob_token_ids": [1 << 20]}),
        (COMPLETIONS, body | {"echo": True}),
        (COMPLETIONS, body | {"logprobs": None}),
        (COMPLETIONS, body | {"use_beam_search": True}),
    ):
        refused = (await server.post(path, **wrong)).json()
        assert refused["error"]["param"] == "logprob_token_ids", refused


async def test_vllms_fields_of_the_prompt(server: ScriptedServer) -> None:
    got = (await server.post(COMPLETIONS, prompt="one two three", prompt_logprobs=1)).json()
    rows = got["choices"][0]["prompt_logprobs"]
    assert got["choices"][0]["logprobs"] is None
    assert rows[0] is None and len(rows) == got["usage"]["prompt_tokens"]
    (entry,) = rows[1].values()
    assert entry["logprob"] == -0.5 and entry["rank"] == 1 and entry["decoded_token"]
    cut = {"truncate_prompt_tokens": 2}
    got = (await server.post(COMPLETIONS, prompt="one two three", **cut)).json()
    assert got["usage"]["prompt_tokens"] == 2
    got = (await server.post(CHAT, messages=USER, **cut)).json()
    assert got["usage"]["prompt_tokens"] == 2
    long = "one " * 50_000  # more characters than the context's tokens can have
    assert (await server.post(COMPLETIONS, prompt=long)).status_code == 400
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
    ):
        got = (await server.post(path, **body, **cut)).json()
        assert got["usage"]["prompt_tokens"] == 2
        refused = await server.post(path, **body, truncate_prompt_tokens=2049)
        assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.text
    for fields in ({"bad_words": ["some very long words"]}, {"allowed_token_ids": [1, 2]}):
        assert (await server.post(COMPLETIONS, prompt="a", **fields)).status_code == 200
        assert (await server.post(CHAT, messages=USER, **fields)).status_code == 200
    wrong = await server.post(COMPLETIONS, prompt="a", allowed_token_ids=[1 << 20])
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "allowed_token_ids"


async def test_vllms_fields_of_a_chat(server: ScriptedServer) -> None:
    got = (await server.post(CHAT, messages=USER, prompt_logprobs=0)).json()
    assert len(got["prompt_logprobs"]) == got["usage"]["prompt_tokens"]
    assert got["prompt_logprobs"][0] is None and got["choices"][0]["logprobs"] is None
    (entry,) = got["prompt_logprobs"][1].values()
    assert entry["logprob"] == -0.5 and entry["decoded_token"]
    assert "prompt_logprobs" not in (await server.post(CHAT, messages=USER)).json()
    for wrong in ({"prompt_logprobs": 1 << 20}, {"prompt_logprobs": 1, "stream": True}):
        refused = await server.post(CHAT, messages=USER, **wrong)
        assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_an_echo_begins_a_continued_message(server: ScriptedServer) -> None:
    for said in ("Here is", [{"type": "text", "text": "Here is"}]):
        talk = [*USER, {"role": "assistant", "content": said}]
        body = {"messages": talk, "continue_final_message": True, "max_tokens": 4}
        plain = (await server.post(CHAT, **body)).json()["choices"][0]["message"]["content"]
        whole = (await server.post(CHAT, **body, echo=True)).json()["choices"][0]["message"]
        assert whole["content"] == "Here is" + plain
        chunks = await server.events(CHAT, **body, echo=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta["content"] or "" for delta in deltas) == whole["content"]
    alone = (await server.post(CHAT, messages=USER, echo=True, max_tokens=4)).json()
    assert alone["choices"][0]["message"]["content"] == plain


async def test_routes_that_clients_ask_for(server: ScriptedServer, toy_folder: Path) -> None:
    assert set((await server.client.get("/version")).json()) == {"version"}
    info = (await server.client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>" and "messages" in info["chat_template"]
    ids = (await server.post("/tokenize", prompt="a b", add_special_tokens=False)).json()["tokens"]
    back = (await server.post("/detokenize", tokens=ids)).json()
    assert back["prompt"] == back["text"] == "a b"
    join = {"src_rids": ["a", "b"], "dst_rid": "c"}
    joined = await server.post("/concate_and_append_request", **join)
    assert joined.status_code == 200 and joined.json()["copied_tokens"] == 0
    assert "no KV cache is copied" in joined.headers["X-RadixLM-Warning"]
    model = (await server.client.get("/get_model_info")).json()
    assert Path(model["model_path"]).is_dir() and Path(model["tokenizer_path"]).is_dir()


async def test_tokenizer_info_has_the_form_of_vllm(
    server: ScriptedServer, toy_folder: Path
) -> None:
    """There tokens with their properties are shown as their texts, and the class is always told."""
    path = toy_folder / "tokenizer_config.json"
    before = path.read_bytes()
    token = {"content": "<u>", "lstrip": False, "special": True}
    more = {"unk_token": token, "added_tokens_decoder": {"3": token}, "list": [token, "x"]}
    try:
        path.write_bytes(orjson.dumps({**orjson.loads(before), **more}))
        info = (await server.client.get("/tokenizer_info")).json()
    finally:
        path.write_bytes(before)
    assert info["unk_token"] == info["added_tokens_decoder"]["3"] == info["list"][0] == "<u>"
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast" and info["bos_token"] == "<s>"


async def test_the_path_of_a_bundled_model_is_its_folder(
    server: ScriptedServer, toy_folder: Path
) -> None:
    server.state.config = server.config.with_values(
        {"model_path": "no-such-folder", "tokenizer_path": "no-such-folder"}
    )
    for path in ("/get_model_info", "/get_server_info"):
        got = (await server.client.get(path)).json()
        assert got["model_path"] == got["tokenizer_path"] == str(toy_folder.resolve())


@pytest.mark.parametrize("wants", ["stop me", "grüße"])
async def test_a_responses_stream_keeps_the_logprobs_of_held_back_text(
    server: ScriptedServer, wants: str
) -> None:
    """Parts of a stop string and of a character have no text when their tokens come."""
    body = {"input": wants, "include": ["message.output_text.logprobs"], "stream": True}
    got = await server.client.post("/v1/responses", json=body | {"stop": ["STOP"]})
    lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
    events = [orjson.loads(line) for line in lines]
    streamed = [
        entry for e in events if e["type"].endswith("output_text.delta") for entry in e["logprobs"]
    ]
    done = next(e for e in events if e["type"].endswith("output_text.done"))
    usage = events[-1]["response"]["usage"]
    assert len(streamed) == usage["output_tokens"]
    assert done["logprobs"] == streamed


async def test_logprobs_of_the_prompt_start_inside_it(server: ScriptedServer) -> None:
    for start, status in ((0, 200), (2, 200), (3, 200), (4, 400)):
        got = await server.post(
            "/generate", input_ids=[10, 11, 12], return_logprob=True, logprob_start_len=start
        )
        assert got.status_code == status, got.text
        if status == 200:
            assert len(got.json()["meta_info"]["input_token_logprobs"]) == 3 - start
    assert got.json()["param"] == "logprob_start_len"


async def test_a_negative_offset_of_a_session_is_a_slice(server: ScriptedServer) -> None:
    session = (await server.post("/open_session", capacity_of_str_len=0)).json()
    sampling = {"max_new_tokens": 2}
    first = {"id": session, "rid": None}
    body = {"input_ids": [10, 11, 12], "sampling_params": sampling, "rid": "one"}
    assert (await server.post("/generate", **body, session_params=first)).status_code == 200
    for offset, kept in ((-1, 4), (-4, 1), (5, 5), (99, 5), (-99, 0)):
        params = {"id": session, "rid": "one", "offset": offset}
        got = await server.post(
            "/generate", input_ids=[20, 21], sampling_params=sampling, session_params=params
        )
        assert got.json()["meta_info"]["prompt_tokens"] == kept + 2, (offset, got.text)
