"""Large bodies and large answers: bounded, admitted in slices, and worked on off the event loop."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import orjson
import pytest
from tests.fakes.http_server import CONTEXT, ScriptedServer

from radixlm.base.errors import PayloadTooLarge
from radixlm.base.record import replace
from radixlm.entrypoints.http import anthropic, ollama, tokenization
from radixlm.entrypoints.http import off_loop as off_loop_module
from radixlm.entrypoints.http.native import generate, parse
from radixlm.entrypoints.http.off_loop import (
    LARGE_LIST,
    MAX_CONTAINERS,
    MAX_VALUES,
    SMALL_BYTES,
    check_body,
    is_large,
    json_pieces,
    off_loop,
)
from radixlm.entrypoints.http.openai import completions, conversation, sampling
from radixlm.entrypoints.http.responses import tool_loop
from radixlm.entrypoints.http.responses.store import MemoryStore, Stored
from radixlm.entrypoints.native import request as native_request
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState

_PLACES = {
    name.rpartition(".")[2]: module
    for module in (generate, completions, conversation, anthropic, ollama, parse, tool_loop)
    for name in (module.__name__,)
}


def _error(got: Any) -> dict[str, Any]:
    assert got.status_code in (400, 413), got.text
    return dict(got.json()["error"])


def _set_facts(server: ScriptedServer, **facts: Any) -> None:
    intake = server.engine.intake
    intake.facts = replace(intake.facts, **facts)


class Most(Observer):
    """The most unfinished sequences at a time, and the keys of their calls."""

    def __init__(self, server: ScriptedServer) -> None:
        self.most, self.calls = 0, set[str | None]()
        self._intake = server.engine.intake
        self._intake.observers = (*self._intake.observers, self)

    def submitted(self, state: RequestState) -> None:
        self.most = max(self.most, len(self._intake.requests))
        self.calls.add(state.wire.call_key)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": ["a"] * 513, "sampling_params": {"n": 16}}, "text"),
        ("/generate", {"input_ids": [[5]] * 513, "sampling_params": {"n": 16}}, "input_ids"),
        ("/v1/completions", {"prompt": ["a"] * 513, "n": 16}, "prompt"),
    ],
)
async def test_prompts_times_n_are_bounded(
    server: ScriptedServer, path: str, body: dict[str, Any], param: str
) -> None:
    error = _error(await server.post(path, **body))
    assert error["param"] == param
    assert "--max-sequences-per-call" in error["message"] and "512 prompts" in error["message"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_large_call_is_sent_in_slices(server: ScriptedServer, n: int) -> None:
    _set_facts(server, slice_size=12)
    seen = Most(server)
    params = {"n": n, "max_new_tokens": 2, "temperature": 0}
    got = await server.post("/generate", text=["hi"] * 100, sampling_params=params)
    assert got.status_code == 200, "the queue of 64 is not filled by it"
    assert len(got.json()) == 100 * n and {a["text"] for a in got.json()} == {"Hello"}
    assert seen.most == 12 and len(seen.calls) == 1
    got = await server.post("/v1/completions", prompt=["hi"] * 100, n=n, max_tokens=2)
    assert [choice["index"] for choice in got.json()["choices"]] == list(range(100 * n))
    assert seen.most == 12 and len(seen.calls) == 2


async def test_large_work_is_done_off_the_loop() -> None:
    loop = threading.get_ident()
    assert await off_loop(SMALL_BYTES, threading.get_ident) == loop
    assert await off_loop(SMALL_BYTES + 1, threading.get_ident) != loop
    assert await off_loop(1 << 30, threading.get_ident) != loop


_LONG = "x" * (SMALL_BYTES + 1)
_TOOL = {"type": "function", "function": {"name": "f", "description": _LONG}}
_ASKED = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
_SCHEMA = {"description": _LONG, "type": "string"}


@pytest.mark.parametrize(
    ("path", "body", "works"),
    [
        ("/generate", {"text": "a", "sampling_params": {"json_schema": _SCHEMA}}, "generate._read"),
        ("/v1/completions", {"prompt": "a", "user": _LONG}, "completions._sampling"),
        ("/v1/completions", {"prompt": [5] * CONTEXT}, "completions._not_in"),
        ("/v1/chat/completions", _ASKED | {"tools": [_TOOL]}, "conversation._checked"),
        ("/v1/chat/completions", _ASKED | {"tools": [_TOOL]}, "conversation._request"),
        ("/v1/messages", _ASKED | {"metadata": {"user_id": _LONG}}, "anthropic.chat_of"),
        ("/v1/messages/count_tokens", _ASKED | {"system": _LONG}, "anthropic._chat"),
        ("/v1/responses", {"input": "a", "user": _LONG}, "tool_loop.messages_of"),
        ("/v1/responses", {"input": "a", "user": _LONG}, "tool_loop.chat_of"),
        ("/api/chat", _ASKED | {"stream": False, "tools": [_TOOL]}, "ollama._chat_of"),
        ("/api/generate", {"model": "tiny", "prompt": _LONG}, "ollama._chat_of_prompt"),
        ("/parse_function_call", {"text": _LONG, "tool_call_parser": "hermes"}, "parse._calls"),
        ("/separate_reasoning", {"text": _LONG, "reasoning_parser": "qwen3"}, "parse._parts"),
    ],
)
async def test_large_bodies_are_read_off_the_loop(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    works: str,
) -> None:
    module, name = works.split(".")
    place: Any = _PLACES[module]
    threads, work = list[int](), getattr(place, name)

    def seen(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return work(*args)

    monkeypatch.setattr(place, name, seen)
    await server.post(path, **body, **({"note": _LONG} if "text" in body else {}))
    assert threads[0] != threading.get_ident()


async def test_a_template_with_large_tools_is_rendered_off_the_loop(server: ScriptedServer) -> None:
    threads, template = set[int](), server.state.template
    render = template.render

    def seen(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return render(*args, **options)

    template.render = seen
    await server.post("/v1/chat/completions", **_ASKED, tools=[_TOOL])
    assert threads and threading.get_ident() not in threads


async def test_a_schema_is_read_once_for_all_prompts(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas: list[str | None] = []

    def seen(schema: str | None, where: str) -> None:
        schemas.append(schema)

    for module in (sampling, native_request):
        monkeypatch.setattr(module, "unheld_of", seen)
    schema, texts = {"type": "string"}, ["a"] * 20
    params = {"json_schema": schema, "max_new_tokens": 1}
    await server.post("/generate", text=texts, sampling_params=params)
    await server.post("/v1/completions", prompt=texts, json_schema=schema, max_tokens=1)
    assert len(schemas) == 2


async def test_texts_to_parse_are_bounded(server: ScriptedServer) -> None:
    text = "x" * ((1 << 20) + 1)
    got = await server.post("/parse_function_call", text=text, tool_call_parser="hermes")
    assert _error(got)["param"] == "text"
    got = await server.post("/separate_reasoning", text=text, reasoning_parser="qwen3")
    assert _error(got)["param"] == "text"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [5] * (CONTEXT + 1)}, "tokens"),
        ("/detokenize", {"tokens": [[5], [5] * (CONTEXT + 1)]}, "tokens"),
        ("/detokenize", {"tokens": [[5]] * 4097}, "tokens"),
        ("/tokenize", {"prompt": "a" * 4_000_000}, "prompt"),
        ("/tokenize", {"prompt": ["a", "a" * 4_000_000]}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 4097}, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}] * (CONTEXT + 1)},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * (CONTEXT + 1)},
            "messages",
        ),
    ],
)
async def test_texts_are_bound_by_the_context(
    server: ScriptedServer, path: str, body: dict[str, Any], param: str
) -> None:
    assert _error(await server.post(path, **body))["param"] == param


async def test_long_texts_within_the_context_are_tokenized(server: ScriptedServer) -> None:
    text = "hello " * 3000
    assert len(text) > SMALL_BYTES
    got = (await server.post("/tokenize", prompt=[text, "hi"] * 70)).json()
    one = (await server.post("/tokenize", prompt=text)).json()
    assert got["tokens"][0] == one["tokens"] and got["count"][1] < 5 and len(got["count"]) == 140


async def test_a_tokenizer_that_is_slow_blocks_nobody(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, is_over = server.engine.intake.tokenizer, threading.Event()
    encode = tokenizer.encode_batch

    def slow(texts: Any, adds: bool = True) -> Any:
        if "bomb" in texts:
            is_over.wait(60)
        return encode(texts, adds)

    monkeypatch.setattr(tokenizer, "may_be_slow", True)
    monkeypatch.setattr(tokenizer, "encode_batch", slow)
    monkeypatch.setattr(tokenization, "SLOW_LIMIT_S", 0.01)
    for _ in range(4):
        answers = [await server.post("/tokenize", prompt=p) for p in ("bomb", ["bomb"])]
        answers.append(await server.post("/generate", text="bomb"))
        assert all("more than 0.01 s" in _error(got)["message"] for got in answers)
    is_over.set()
    monkeypatch.setattr(tokenization, "SLOW_LIMIT_S", 60)
    assert (await server.post("/tokenize", prompt="bomb")).status_code == 200


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"messages":[' + b"{}," * MAX_CONTAINERS + b"{}]}", "lists and objects"),
        (b'{"tokens":[' + b"1," * (MAX_VALUES + 1) + b"1]}", "values"),
    ],
)
async def test_bodies_of_too_many_values_are_refused(
    server: ScriptedServer, data: bytes, what: str
) -> None:
    with pytest.raises(PayloadTooLarge, match=what):
        check_body(data)
    for path in ("/generate", "/detokenize", "/v1/chat/completions"):
        headers = {"content-type": "application/json"}
        got = await server.client.post(path, content=data, headers=headers)
        assert got.status_code == 413 and what in _error(got)["message"]


def test_text_in_strings_counts_as_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "[{" * MAX_CONTAINERS + "," * (MAX_VALUES + 1)
    check_body(orjson.dumps({"text": code}))
    rng = random.Random(5)
    for size in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr(off_loop_module, "HUGE_BYTES", size)
        for _ in range(40):
            texts = ["".join(rng.choices('\\",[{a', k=rng.randrange(9))) for _ in range(6)]
            value = [texts[:3], {text: [text] for text in texts}, {"x": texts}]
            found = b"".join(off_loop_module._structure(orjson.dumps(value)))
            bare = [["a"] * 3, {str(i): ["a"] for i in range(len(set(texts)))}, {"x": ["a"] * 6}]
            kept = re.sub(rb"[^\[{,]", b"", orjson.dumps(bare))
            assert found == kept


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1, 2]},
        [[i, -0.5, None] for i in range(3 * LARGE_LIST)],
        {"a": {"top": [[[0.5, i, "ä"]] * 20 for i in range(700)]}, "b": [], 'q"': None},
        [{"x": [list(range(LARGE_LIST + 1))] * 3, "y": {}}, {"x": []}, 4],
        {"rows": [list(range(LARGE_LIST + 5)), [], [[1]] * (LARGE_LIST + 1)]},
    ],
)
def test_pieces_of_json_are_the_whole(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == orjson.dumps(value)
    assert (len(pieces) > 1) == is_large(value)
    assert max(map(len, pieces)) < 300_000


async def test_logprobs_of_a_call_are_bounded(server: ScriptedServer) -> None:
    body = {"input_ids": [5] * 1900, "return_logprob": True, "logprob_start_len": 0}
    body |= {"sampling_params": {"max_new_tokens": 1}}
    large = body | {"top_logprobs_num": 400, "sampling_params": {"n": 2, "max_new_tokens": 1}}
    error = _error(await server.post("/generate", **large))
    assert error["param"] == "top_logprobs_num" and "--max-logprobs" in error["message"]
    many = body | {"input_ids": [[5] * 1900] * 60, "top_logprobs_num": 10}
    assert "--max-logprobs" in _error(await server.post("/generate", **many))["message"]
    got = await server.post("/generate", **body, top_logprobs_num=10)
    meta = got.json()["meta_info"]
    assert is_large(got.json()), "it is sent in pieces"
    assert len(meta["input_top_logprobs"]) == 1900 and len(meta["input_top_logprobs"][1]) == 10
    assert meta["input_token_logprobs"][0] == [None, 5, None]


async def test_logprobs_bound_an_answer_of_any_length(server: ScriptedServer) -> None:
    _set_facts(server, max_logprobs=60)
    body = {"messages": [{"role": "user", "content": "forever"}], "logprobs": True}
    got = (await server.post("/v1/chat/completions", **body, top_logprobs=5)).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert len(got["choices"][0]["logprobs"]["content"]) == 10
    error = _error(await server.post("/v1/chat/completions", **body, max_tokens=61))
    assert error["param"] == "top_logprobs" and "--max-logprobs" in error["message"]
    for name in ("logprobs", "prompt_logprobs"):  # all of the vocabulary
        error = _error(await server.post("/v1/completions", prompt=[5, 6], echo=True, **{name: -1}))
        assert error["param"] == name and error["message"].startswith(f"{name}: this call may")


@pytest.mark.parametrize(
    "metadata", [{"a": "x" * 513}, {"k" * 65: "x"}, {f"k{i}": "x" for i in range(17)}]
)
async def test_metadata_has_the_bounds_of_openai(
    server: ScriptedServer, metadata: dict[str, str]
) -> None:
    got = await server.post("/v1/responses", input="hi", metadata=metadata)
    assert str(_error(got)["param"]).startswith("metadata")
    body = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    got = await server.post("/v1/batches", **body, metadata=metadata)
    assert str(_error(got)["param"]).startswith("metadata")
    fits = {f"{i:064}": "x" * 512 for i in range(16)}
    assert (await server.post("/v1/responses", input="hi", metadata=fits)).status_code == 200


def test_stored_responses_are_bounded_by_bytes() -> None:
    def stored(name: str, num_bytes: int) -> Stored:
        return Stored({"id": name}, [], [{"role": "user", "content": "x" * num_bytes}])

    store = MemoryStore(max_bytes=10_000)
    for i in range(5):
        store.put(stored(f"r{i}", 3000))
    assert store.get("r0") is store.get("r1") is None and store.num_bytes <= 10_000
    assert store.get("r4") == stored("r4", 3000)
    store.put(stored("r4", 10))
    assert store.num_bytes < 7000 and store.get("r2") is not None
    store.put(stored("huge", 20_000))
    assert store.get("huge") is None and store.num_bytes == 0
    assert json.dumps(store.delete("r4")) == "false"
