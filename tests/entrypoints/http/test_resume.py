"""A stream that is cut after any of its blocks goes on, on a second server, byte for byte."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
import pytest_asyncio
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes import http_server
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.fakes.lockstep import LockstepLink

from radixlm.intake import stream_journal
from radixlm.router.call import Call
from radixlm.router.journal import HEADER, Journal
from radixlm.router.worker import Worker

Pair = tuple[ScriptedServer, ScriptedServer]
NAME = "req-1"
TIMES = re.compile(rb'"(e2e_latency|queue_time|completed_at|created_at|\w+_duration)":("?)[^,}]*')


@pytest_asyncio.fixture
async def pair(toy_folder: Path, monkeypatch: Any) -> AsyncIterator[Pair]:
    monkeypatch.setattr(http_server, "ThreadLink", LockstepLink)
    async with (
        scripted_server(toy_folder, SCRIPT) as first,
        scripted_server(toy_folder, SCRIPT) as second,
    ):
        yield first, second


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 40}
    return "/v1/chat/completions", body | fields


async def raw(server: ScriptedServer, path: str, body: bytes, **headers: str) -> bytes:
    """The answer of a stream with its records."""
    await server.client.post("/flush_cache", json={"timeout": 10})  # answers tell what was cached
    sent = {HEADER[0].decode(): "1", "x-request-id": NAME, "content-type": "application/json"}
    got = await server.client.post(path, content=body, headers=sent | headers)
    assert got.status_code == 200, got.text
    return got.content


async def gateway_journal(server: ScriptedServer, path: str, body: bytes) -> Journal:
    worker = Worker("http://first")
    worker.facts = (await server.client.get("/server_info")).json()
    return Journal(Call("POST", path, "", [], body), worker)


def blocks_of(data: bytes, separator: bytes = b"\n\n") -> list[bytes]:
    return [part + separator for part in data.split(separator)[:-1]]


def timeless(data: bytes) -> bytes:
    return TIMES.sub(rb'"\1":0', data)


def by_choice(data: bytes) -> list[bytes]:
    """The blocks in their order within a choice: that among choices is the scheduler's."""

    def choice(block: bytes) -> int:
        if not block.startswith(b"data: {"):
            return 0
        value = orjson.loads(block[6:])
        choices = value.get("choices", [value])
        return choices[0].get("index", 0) if choices else 99

    blocks = blocks_of(timeless(data))
    return sorted(blocks[:-1], key=choice) + blocks[-1:]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
KINDS = {
    "chat": chat("grüße"),
    "usage": chat("grüße", stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "tools": chat("sum please", tools=[TOOL]),
    "two calls": chat("two calls", tools=[TOOL], n=2),
    "reasoning": chat("think about", enable_thinking=True),
    "n": chat("stop me", n=3, seed=5),
    "logprobs": chat("grüße", logprobs=True, top_logprobs=3, return_token_ids=True),
    "stop": chat("stop me", stop=["STOP"]),
    "completions": (
        "/v1/completions",
        {"prompt": ["grüße", "stop me", "forever"], "logprobs": 2, "echo": True, "max_tokens": 12},
    ),
    "generate": ("/generate", {"text": "grüße", "return_logprob": True, "logprob_start_len": 0}),
    "batch": (
        "/generate",
        {"text": ["grüße", "forever"], "sampling_params": {"max_new_tokens": 9, "n": 2}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "sum please"}], "max_tokens": 60},
    ),
    "responses": ("/v1/responses", {"input": "think about", "reasoning": {"effort": "low"}}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "grüße"}]}),
}


SEVERAL = ("two calls", "n", "completions", "batch")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_goes_on_after_any_block(pair: Pair, kind: str) -> None:
    path, fields = KINDS[kind]
    body = orjson.dumps({"stream": True} | fields)
    first, second = pair
    whole = await raw(first, path, body)
    separator = b"\n" if path.startswith("/api/") else b"\n\n"
    stripped = Journal(Call("POST", path, "", [], body), Worker("http://w")).feed(whole)
    shown = blocks_of(stripped, separator)
    sent = blocks_of(whole, separator)
    if separator == b"\n":  # a line of records is part of the block after it
        sent = [
            line + sent[i] if (line := sent[i - 1]).startswith(b": j") else sent[i]
            for i in range(len(sent))
            if not sent[i].startswith(b": j")
        ]
    assert len(shown) == len(sent) > 3
    for cut in range(1, len(sent) + 1):
        journal = await gateway_journal(first, path, body)
        got = journal.feed(b"".join(sent[:cut]) + sent[0][:7])
        journal.lost()
        resumed = Call("POST", path, "", [], body).overridden(journal.resume_fields())
        got += journal.feed(await raw(second, path, resumed))
        if kind in SEVERAL:
            assert by_choice(got) == by_choice(b"".join(shown)), cut
        else:
            assert timeless(got) == timeless(b"".join(shown)), cut
        assert journal.num_blocks == len(shown)
        await asyncio.sleep(0)


async def test_a_stream_moves_twice(pair: Pair) -> None:
    path, fields = KINDS["logprobs"]
    body = orjson.dumps(fields)
    whole = blocks_of(await raw(pair[0], path, body))
    journal = await gateway_journal(pair[0], path, body)
    got = journal.feed(b"".join(whole[:3]))
    for _ in range(2):
        journal.lost()
        resumed = Call("POST", path, "", [], body).overridden(journal.resume_fields())
        rest = blocks_of(await raw(pair[1], path, resumed))
        got += journal.feed(b"".join(rest[:3]))
    assert journal.num_blocks == 9
    assert got == Journal(Call("POST", path, "", [], body), Worker("http://w")).feed(
        b"".join(whole[:9])
    )


async def records_of(server: ScriptedServer, path: str, body: bytes) -> list[str]:
    journal = await gateway_journal(server, path, body)
    journal.feed(b"".join(blocks_of(await raw(server, path, body))[:3]))
    return journal.resume_fields()["resume"]["journal"]


def record(value: Any) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


def delta(**fields: Any) -> str:
    return record([1, 0, 0, [{"rid": "r", "prompt_tokens": 9} | fields]])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda head, rest: ["%%%"], "resume.journal[0]"),
        (lambda head, rest: [record([7])], "resume.journal[0]"),
        (lambda head, rest: rest, "a head comes first"),
        (lambda head, rest: [head, head], "a head comes first"),
        (lambda head, rest: [record([0, b"n", 1, "r", "other"]), *rest], "resume_digest other"),
        (lambda head, rest: [head, record([1, 0, 3, [5]])], "no sample 3"),
        (lambda head, rest: [head, record([1, 0, 0, [1 << 40]])], "not a token id"),
        (lambda head, rest: [head, record([1, 0, 0, [5], 77])], "another prompt"),
        (lambda head, rest: [head, record([1, 0, 0, [5] * 500])], "more tokens"),
        (lambda head, rest: [head, delta(pooled=[1.0])], "do not fit"),
        (lambda head, rest: [head, delta(tokens=[3], logprobs={"chosen": []})], "do not fit"),
        (lambda head, rest: [head, delta(tokens=["x"])], "resume.journal[1]"),
    ],
)
async def test_records_are_checked(pair: Pair, spoil: Any, says: str) -> None:
    path, fields = KINDS["chat"]
    head, *rest = await records_of(pair[0], path, orjson.dumps(fields))
    resume = {"journal": spoil(head, rest), "num_events": 2}
    got = await pair[1].client.post(path, json=fields | {"resume": resume})
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["param"] == "resume.journal"
    assert says in error["message"]
    assert not pair[1].engine.intake.requests


async def test_a_record_of_another_request_of_the_call_ends_it(
    pair: Pair, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stream_journal, "_TURN_S", 0.01)
    path, fields = KINDS["chat"]
    head, *rest = await records_of(pair[0], path, orjson.dumps(fields))
    resume = {"journal": [head, record([1, 5, 0, [5]]), *rest], "num_events": 1}
    got = await pair[1].client.post(path, json=fields | {"resume": resume})
    assert got.status_code == 400
    assert "no such request" in got.json()["error"]["message"]
    assert not pair[1].engine.intake.requests


async def test_no_record_without_the_header(pair: Pair) -> None:
    path, fields = KINDS["chat"]
    got = await pair[0].client.post(path, json=fields)
    assert got.status_code == 200
    assert b": j " not in got.content


async def test_a_server_that_shuts_down_says_so_and_cuts_its_streams(pair: Pair) -> None:
    server, intake = pair[0], pair[0].engine.intake
    path, fields = chat("forever", max_tokens=2000)
    async with listening(server) as port, httpx.AsyncClient(timeout=60) as client:
        base = f"http://127.0.0.1:{port}"
        headers = {HEADER[0].decode(): "1"}
        journal, drain = await gateway_journal(server, path, orjson.dumps(fields)), None
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", base + path, json=fields, headers=headers) as got:
                async for chunk in got.aiter_raw():
                    shown = journal.feed(chunk)
                    assert b"error" not in shown and b"[DONE]" not in shown
                    if drain is None and journal.num_blocks > 3:
                        drain = asyncio.create_task(intake.drain(0.05))
                        await asyncio.sleep(0)
                        ready = await client.get(base + "/ready")
                        assert ready.status_code == 503
                        assert ready.json()["error"]["code"] == "draining"
        assert journal.is_draining
        assert drain is not None and not await drain


@pytest.mark.parametrize("num_emitted", [1, 4, 6])
async def test_generate_goes_on_after_emitted_ids(pair: Pair, num_emitted: int) -> None:
    sampling = {"max_new_tokens": 9, "stop": "never"}
    prompt = pair[0].tokenizer.encode("grüße", False)
    body = {"input_ids": prompt, "sampling_params": sampling}
    whole = (await pair[0].client.post("/generate", json=body)).json()
    ids = whole["output_ids"]
    body["input_ids"] = prompt + ids[:num_emitted]
    body["resume"] = {"num_emitted": num_emitted}
    rest = (await pair[1].client.post("/generate", json=body)).json()
    assert rest["output_ids"] == ids[num_emitted:]
    assert whole["text"].endswith(rest["text"])
    for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert rest["meta_info"][name] == whole["meta_info"][name]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": "x"}, "needs input_ids"),
        ({"input_ids": [[5, 6], [7, 8]]}, "needs input_ids"),
        ({"input_ids": [5, 6], "sampling_params": {"n": 2}}, "needs input_ids"),
        ({"input_ids": [5]}, "one must be the prompt's"),
        ({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}, "max_new_tokens"),
    ],
)
async def test_emitted_ids_are_checked(pair: Pair, fields: Any, says: str) -> None:
    got = await pair[0].client.post("/generate", json=fields | {"resume": {"num_emitted": 1}})
    assert got.status_code == 400
    assert got.json()["error"]["param"] == "resume.num_emitted"
    assert says in got.json()["error"]["message"]


async def test_a_request_that_kills_servers_is_computed_alone(pair: Pair) -> None:
    intake, seen = pair[0].engine.intake, []
    send = intake._dispatch
    intake._dispatch = lambda state, wire: (  # type: ignore[method-assign]
        seen.append((wire.is_quarantined, state.crash_count)),
        send(state, wire),
    )
    path, fields = KINDS["chat"]
    for resume in ({}, {"resume": {"kills": 1}}):
        assert (await pair[0].client.post(path, json=fields | resume)).status_code == 200
    assert seen == [(False, 0), (True, 1)]
