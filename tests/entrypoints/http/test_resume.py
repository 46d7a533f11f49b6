"""A stream that is cut after any of its blocks goes on, on a second server, byte for byte."""

from __future__ import annotations

import asyncio
import base64
import random
import shutil
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
from tests.fakes.cut_streams import (
    blocks_of,
    call_of,
    check_all_cuts,
    gateway_journal,
    raw,
    without_records,
)
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.fakes.lockstep import LockstepLink

from radixlm.base.record import replace
from radixlm.continuation import stream_journal
from radixlm.entrypoints.http.middleware import forget_request_id
from radixlm.entrypoints.http.resume import known_digest, resume_digest, take_resume
from radixlm.entrypoints.request_model import ResumeBody
from radixlm.intake import tokenizer_manager
from radixlm.intake.identity import Identity, set_identity
from radixlm.router.journal import HEADER
from radixlm.wire.replies import LoadReport
from radixlm.wire.requests import AbortRequest

Pair = tuple[ScriptedServer, ScriptedServer]


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
    clients = pair[0].client, pair[1].client
    assert len(await check_all_cuts(*clients, path, body, has_choices=kind in SEVERAL)) > 3


async def test_a_stream_moves_twice(pair: Pair) -> None:
    path, fields = KINDS["logprobs"]
    body = orjson.dumps(fields)
    whole = blocks_of(await raw(pair[0].client, path, body))
    journal = await gateway_journal(pair[0].client, path, body)
    got = journal.feed(b"".join(whole[:3]))
    for _ in range(2):
        journal.lost()
        resumed = call_of(path, body).overridden(journal.resume_fields())
        rest = blocks_of(await raw(pair[1].client, path, resumed))
        got += journal.feed(b"".join(rest[:3]))
    assert journal.num_blocks == 9
    assert got == without_records(path, b"".join(whole[:9]))


async def records_of(server: ScriptedServer, path: str, body: bytes) -> list[str]:
    journal = await gateway_journal(server.client, path, body)
    journal.feed(b"".join(blocks_of(await raw(server.client, path, body))[:3]))
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


async def test_work_of_its_own_has_no_journal() -> None:
    """Such as a batch: its answers are of other times than the request that began it."""
    stream_journal.begin_journal("r")
    forget_request_id()
    assert stream_journal.current_journal() is None


async def test_no_record_without_the_header(pair: Pair) -> None:
    path, fields = KINDS["chat"]
    got = await pair[0].client.post(path, json=fields)
    assert got.status_code == 200
    assert b": j " not in got.content


async def test_a_server_that_shuts_down_cuts_its_streams_at_last(pair: Pair) -> None:
    server, intake = pair[0], pair[0].engine.intake
    path, fields = chat("forever", max_tokens=2000)
    async with listening(server) as port, httpx.AsyncClient(timeout=60) as client:
        base = f"http://127.0.0.1:{port}"
        headers = {HEADER[0].decode(): "1"}
        journal, drain = await gateway_journal(server.client, path, orjson.dumps(fields)), None
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
        assert drain is not None and not await drain
        intake.replicas.send(AbortRequest(all=True, quiet=True))  # its engine would end with it
        async with asyncio.timeout(60):
            while server.engine.scheduler.planner.running:
                await asyncio.sleep(0.01)


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


@pytest.mark.parametrize("is_admin", [True, False])
async def test_only_the_operator_tells_of_kills(is_admin: bool) -> None:
    """A request that is computed alone goes before those of other clients."""

    async def kills() -> int:
        journal = stream_journal.begin_journal("r")
        set_identity(Identity("someone", is_admin))
        await take_resume(ResumeBody(kills=1))
        assert journal is not None
        return journal.kills

    assert await asyncio.create_task(kills()) == int(is_admin)


@pytest.mark.parametrize(("is_admin", "status"), [(True, 200), (False, 503)])
async def test_a_client_cannot_pass_a_full_queue(
    pair: Pair, monkeypatch: Any, is_admin: bool, status: int
) -> None:
    """By the claim that its request has run elsewhere."""
    intake = pair[0].engine.intake
    monkeypatch.setattr(type(intake), "load", LoadReport(num_waiting=3))
    intake.facts = replace(intake.facts, max_queued=3)
    monkeypatch.setattr(tokenizer_manager, "identity", lambda: Identity("someone", is_admin))
    fields = {"input_ids": [5, 6, 7], "resume": {"num_emitted": 1}}
    got = await pair[0].client.post("/generate", json=fields)
    assert got.status_code == status


def odd(rng: random.Random) -> Any:
    """A value that a hostile client may put anywhere in a record."""
    return rng.choice(
        [None, -1, 0, 7, 1 << 62, -0.5, float("nan"), "", "x" * 99, b"\xff", [], [[]], {}, True]
    )


def odd_delta(rng: random.Random, prompt_tokens: int) -> Any:
    ids = [rng.choice([3, 5, 499, 500, -1, 1 << 40]) for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        return rng.choice([*ids, odd(rng)])
    pairs = [[-0.5, token] for token in ids]
    fields = {
        "tokens": ids,
        "prompt_tokens": rng.choice([prompt_tokens, 0]),
        "logprobs": {"chosen": pairs, "top": [pairs], "asked": [None]},
        "prompt_logprobs": {"chosen": [[None, 5], *pairs], "top": []},
        "finish": {"kind": rng.choice(["stop", "length", "abort", "error"]),
                   "status": rng.choice([0, 7, 408, 999]), "matched": rng.choice([None, "x", 3])},
        "hidden_states": [b"123"],
        "cached_by_tier": {"host": rng.choice([1, -5])},
        "draft_rounds": [1, -1],
        "retractions": odd(rng),
    }  # fmt: skip
    names = [name for name in fields if rng.random() < 0.3]
    return {"rid": "r"} | {"prompt_tokens": prompt_tokens} | {name: fields[name] for name in names}


@pytest.mark.parametrize("kind", ["chat", "logprobs", "completions", "generate", "responses"])
async def test_hostile_records_never_are_an_internal_error(
    server: ScriptedServer, kind: str, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stream_journal, "_TURN_S", 0.001)
    path, fields = KINDS[kind]
    head, *rest = await records_of(server, path, orjson.dumps({"stream": True} | fields))
    first = msgspec.msgpack.decode(base64.b64decode(rest[0]))
    prompt_tokens, rng = first[3][0]["prompt_tokens"], random.Random(kind)
    statuses = set()
    for _ in range(150):
        journal = [head, *rest[: rng.randrange(3)]]
        for _ in range(rng.randrange(4)):
            calls = [odd_delta(rng, prompt_tokens) for _ in range(rng.randrange(3))]
            value = [1, 0, rng.choice([0, 0, 0, 2]), calls]
            if rng.random() < 0.1:
                value[rng.randrange(4)] = odd(rng)
            journal.append(record(value))
        resume = {"journal": journal, "num_events": rng.randrange(6)}
        body = {"stream": True} | fields | {"resume": resume}
        got = await server.client.post(path, json=body)
        statuses.add(got.status_code)
        assert "internal error" not in got.text, journal
    assert {200, 400} <= statuses
    assert not [one for one in caplog.records if one.exc_info]
    assert not server.engine.intake.requests


@pytest.mark.parametrize("resume", [{"kills": 1}, {"journal": "head"}])
async def test_more_blocks_than_the_answer_has(server: ScriptedServer, resume: Any) -> None:
    path, fields = KINDS["chat"]
    head, *_ = await records_of(server, path, orjson.dumps(fields))
    body = fields | {"resume": resume | {"num_events": 10**15}}
    if "journal" in resume:
        body["resume"]["journal"] = [head]
    async with asyncio.timeout(20):
        got = await server.client.post(path, json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "resume.num_events")
    assert not server.engine.intake.requests


async def test_records_without_tokens_are_bounded(server: ScriptedServer) -> None:
    path, fields = KINDS["chat"]
    head, first, *_ = await records_of(server, path, orjson.dumps(fields))
    told = msgspec.msgpack.decode(base64.b64decode(first))[3][0] | {"tokens": []}
    journal = [head, *[record([1, 0, 0, [told]])] * 400]
    got = await server.client.post(path, json=fields | {"resume": {"journal": journal}})
    assert got.status_code == 400
    assert "more tokens than the request may have" in got.json()["error"]["message"]


async def test_a_replay_wakes_only_the_request_whose_turn_it_is(monkeypatch: Any) -> None:
    journal, num_woken = stream_journal.StreamJournal("r", is_wanted=False), 0
    wait = asyncio.Event.wait

    async def counted(event: asyncio.Event) -> Any:
        nonlocal num_woken
        await wait(event)
        num_woken += 1

    monkeypatch.setattr(asyncio.Event, "wait", counted)

    async def request(first: int) -> list[int]:
        seen = []
        for place in range(first, 400, 40):
            await journal.reach(place)
            seen.append(place)
            journal.advance()
        return seen

    found = await asyncio.gather(*map(request, range(40)))
    assert found == [list(range(first, 400, 40)) for first in range(40)]
    assert num_woken <= 400


async def test_the_digest_tells_servers_apart(toy_folder: Path, tmp_path: Path) -> None:
    async def digest(folder: Path, **options: Any) -> Any:
        async with scripted_server(folder, SCRIPT, **options) as server:
            await resume_digest(server.state)
            return (await server.client.get("/server_info")).json()["resume_digest"]

    shutil.copytree(toy_folder, tmp_path / "copy")
    first = await digest(toy_folder)
    assert first == await digest(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"other weights")
    others = [
        await digest(tmp_path / "copy"),
        await digest(toy_folder, served_model_name="other"),
        await digest(toy_folder, weight_version="v2"),
        await digest(toy_folder, tool_call_parser="mistral"),
        await digest(toy_folder, sampling_defaults="openai"),
        await digest(toy_folder, preferred_sampling_params='{"temperature": 0.1}'),
        await digest(toy_folder, constrained_json_disable_any_whitespace=True),
    ]
    assert len({first, *others}) == 8


async def test_a_digest_that_takes_long_is_told_later(server: ScriptedServer) -> None:
    made: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server.state.base_digest = made
    assert await known_digest(server.state, 0.01) is None
    path, fields = KINDS["chat"]
    async with asyncio.timeout(20):  # streams are not recorded until then, and do not wait
        headers = {HEADER[0].decode(): "1"}
        got = await server.client.post(path, json=fields, headers=headers)
    assert got.status_code == 200 and b": j " not in got.content
    made.set_result("base")
    assert await known_digest(server.state) == await resume_digest(server.state)
