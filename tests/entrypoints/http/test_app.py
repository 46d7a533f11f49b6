"""Health, information, administration, and requests that must never be a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.entrypoints.http.app import make_uvicorn
from radixlm.entrypoints.http.middleware import ADMIN_PATHS
from radixlm.wire.replies import Failed

CHAT = "/v1/chat/completions"
PLAIN = {"messages": [{"role": "user", "content": "hi"}]}


async def test_health_of_a_serving_server(server: ScriptedServer) -> None:
    for path in ("/health", "/ready", "/health_generate", "/ping"):
        got = await server.client.get(path)
        assert got.status_code == 200 and got.text == "", path
    assert (await server.client.head("/health")).status_code == 200


async def test_health_while_draining(server: ScriptedServer) -> None:
    server.engine.intake.leaving.set()
    for path in ("/health", "/ready", "/health_generate"):
        got = await server.client.get(path)
        assert got.status_code == 503 and got.headers["retry-after"] == "1", path
    refused = await server.post(CHAT, **PLAIN)
    assert refused.status_code == 503 and "retry-after" in refused.headers


async def test_a_starting_server_is_not_healthy(server: ScriptedServer) -> None:
    for replica in server.engine.intake.replicas:
        replica.facts, facts = {}, replica.facts
        assert (await server.client.get("/health")).status_code == 503
        replica.facts = facts
    assert (await server.client.get("/health")).status_code == 200


async def test_a_restarting_engine_lives_but_is_not_ready(server: ScriptedServer) -> None:
    server.engine.intake.ready.clear()
    assert (await server.client.get("/health")).status_code == 200
    assert (await server.client.get("/ready")).status_code == 503
    server.engine.intake.ready.set()


async def test_a_failed_engine_is_neither_live_nor_ready(server: ScriptedServer) -> None:
    server.engine.intake.failure = Failed("EngineError", "gone")
    assert (await server.client.get("/health")).status_code == 503
    assert (await server.client.get("/ready")).status_code == 503


async def test_pause_and_continue(server: ScriptedServer) -> None:
    paused = await server.post("/pause_generation", mode="in_place")
    assert paused.json()["status"] == "ok"
    assert (await server.client.get("/ready")).status_code == 503
    waiting = asyncio.create_task(server.post(CHAT, **PLAIN))
    assert (await server.post("/continue_generation")).status_code == 200
    assert (await waiting).status_code == 200
    assert (await server.post("/pause_generation", mode="nap")).json()["error"]["param"] == "mode"


async def test_idle_connections_are_closed_by_clients_first(server: ScriptedServer) -> None:
    """If the server closes a connection at the moment of its reuse, the client loses its
    request."""
    kept_s = make_uvicorn(server.app, server.config).config.timeout_keep_alive
    proxies_s, httpx_s = 60, httpx.Limits().keepalive_expiry
    assert httpx_s is not None and kept_s > max(proxies_s, httpx_s)


async def test_information(server: ScriptedServer) -> None:
    model = (await server.client.get("/get_model_info")).json()
    assert model == (await server.client.get("/model_info")).json()
    assert model["is_generation"] is True and model["weight_version"] == "default"
    info = (await server.client.get("/get_server_info")).json()
    assert info["status"] == "ready" and info["max_total_num_tokens"] > 0
    assert info["internal_states"][0]["memory_usage"] == {"verb": "memory_usage"}
    assert (await server.client.get("/get_load")).json()[0]["dp_rank"] == 0
    loads = (await server.client.get("/v1/loads?include=core")).json()
    assert "num_running_reqs" in loads["loads"][0] and "token_usage" not in loads["loads"][0]
    text = (await server.client.get("/v1/loads?format=prometheus")).text
    assert "sglang:load_num_running_reqs" in text
    assert (await server.client.get("/v1/loads?include=all,x")).status_code == 400


async def test_secrets_are_not_shown(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, api_key="s3cret", admin_api_key="adm1n") as made:
        assert (await made.client.get("/get_server_info")).status_code == 401
        key = {"Authorization": "Bearer s3cret"}
        got = await made.client.get("/get_server_info", headers=key)
        assert got.status_code == 200 and "s3cret" not in got.text and "adm1n" not in got.text
        assert (await made.client.post("/flush_cache", headers=key)).status_code == 401
        admin = {"Authorization": "Bearer adm1n"}
        assert (await made.client.post("/flush_cache", headers=admin)).status_code == 200
        assert (await made.client.get("/health")).status_code == 200


async def test_the_admin_key_opens_ordinary_routes_too(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, api_key="s3cret", admin_api_key="adm1n") as made:
        for key, status in (("adm1n", 200), ("s3cret", 200), ("adm1", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            got = await made.client.get("/v1/models", headers=headers)
            assert got.status_code == status, key


async def test_models(server: ScriptedServer) -> None:
    card = (await server.client.get("/v1/models")).json()["data"][0]
    assert card["id"] == "tiny" and card["max_model_len"] == 2048
    assert (await server.client.get("/v1/models/tiny")).json() == card
    assert (await server.client.get("/v1/models/")).json()["data"] == [card]
    missing = await server.client.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


async def test_administration(server: ScriptedServer) -> None:
    for method in ("GET", "POST"):
        got = await server.client.request(method, "/flush_cache")
        assert got.status_code == 200 and got.text.startswith("Cache flushed.")
    assert (await server.client.get("/slow_down?forward_sleep_time=0")).status_code == 200
    assert (await server.post("/slow_down", forward_sleep_time="x")).status_code == 400
    assert (await server.client.post("/freeze_gc")).status_code == 200
    logged = await server.post("/configure_logging", log_requests=True, log_requests_level=3)
    assert logged.json() == {"log_requests": True, "log_requests_level": 3}
    bad = await server.post("/set_internal_state", server_args={"tp_size": 2})
    assert bad.status_code == 400 and "tp_size" in bad.json()["error"]["message"]
    weights = (await server.post("/get_weights_by_name", name="x")).json()
    assert weights["name"] == "x" and weights["truncate_size"] == 100
    version = await server.post("/update_weight_version", new_version="v2")
    assert version.json()["success"] is True
    assert (await server.client.get("/get_weight_version")).json() == {"weight_version": "v2"}
    assert (await server.post(CHAT, **PLAIN)).json()["metadata"] == {"weight_version": "v2"}


async def test_what_one_of_several_processes_cannot_do_is_refused(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, tokenizer_worker_num=2) as made:
        for path, body in (
            ("/update_weight_version", {"new_version": "v2"}),
            ("/open_session", {"capacity_of_str_len": 9}),
        ):
            got = await made.post(path, **body)
            assert got.status_code == 400 and "--tokenizer-worker-num at 1" in got.text


async def test_flush_is_refused_while_a_request_runs(server: ScriptedServer) -> None:
    server.engine.executor.is_slow = True
    body = {"messages": [{"role": "user", "content": "forever"}]}
    running = asyncio.create_task(server.post(CHAT, **body))
    while not server.engine.intake.requests:
        await asyncio.sleep(0)
    assert (await server.client.post("/flush_cache")).status_code == 400
    assert (await server.post("/abort_request", abort_all=True)).json()["num_aborted"] == 1
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"


async def test_what_is_not_built_says_so(server: ScriptedServer) -> None:
    got = await server.post("/v1/audio/speech")
    assert got.status_code == 501 and "text-to-speech" in got.json()["error"]["message"]
    got = await server.post("/set_trace_level", level=1)
    assert got.status_code == 400 and "--enable-trace" in got.json()["error"]["message"]


async def test_tokenize_and_back(server: ScriptedServer) -> None:
    got = (await server.post("/tokenize", prompt="hello there")).json()
    assert got["count"] == len(got["tokens"]) and got["max_model_len"] == 2048
    text = (await server.post("/v1/detokenize", tokens=got["tokens"])).json()["text"]
    assert text == "hello there"
    chat = (await server.post("/v1/tokenize", messages=PLAIN["messages"])).json()
    assert chat["count"] > got["count"]
    assert (await server.post("/detokenize", tokens=[10**9])).json()["error"]["param"] == "tokens"
    for tokens, place in (([1, "a"], "tokens[1]"), ([[1], ["a"]], "tokens[1][0]")):
        error = (await server.post("/detokenize", tokens=tokens)).json()["error"]
        assert error["param"] == place and error["message"].count("tokens[") == 1
    assert (await server.post("/tokenize")).status_code == 400
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain, with_tools, without = [
        (await server.post("/tokenize", **chat, **more)).json()["count"]
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
    ]
    assert plain == without < with_tools


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe{",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"5",
        b"null",
        b'"text"',
        b"[]",
        b"\x00" * 10_000_000,
    ],
    ids=range(14),
)
async def test_garbage_is_a_400_everywhere(server: ScriptedServer, data: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, "/v1/completions", "/generate", "/tokenize"):
        got = await server.client.post(path, content=data, headers=headers)
        assert got.status_code == 400, (path, got.text[:300])
        assert got.json()["error"]["message"]


async def test_a_byte_order_mark_is_skipped_and_utf_16_named(server: ScriptedServer) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/generate", "/tokenize"):
        text = '{"prompt": "hi", "text": "hi"}'
        for encoding, status in (("utf-8-sig", 200), ("utf-16", 400), ("utf-32-be", 400)):
            data = text.encode(encoding)
            got = await server.client.post(path, content=data, headers=headers)
            assert got.status_code == status, (path, encoding, got.text)
            assert status == 200 or "JSON is UTF-8" in got.json()["error"]["message"]


async def test_content_type_and_method(server: ScriptedServer) -> None:
    got = await server.client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert got.status_code == 400 and got.json()["error"]["param"] == "Content-Type"
    assert (await server.client.get(CHAT)).status_code == 405
    for path in ("/health", "/ready", "/", "/api/tags", "/api/version"):
        found = await server.client.head(path)
        assert (found.status_code, found.content) == (200, b""), path
    missing = await server.client.get("/nowhere")
    assert missing.status_code == 404 and "/nowhere" in missing.json()["error"]["message"]


async def test_request_ids_travel(server: ScriptedServer) -> None:
    got = await server.client.get("/health", headers={"x-request-id": "abc"})
    assert got.headers["x-request-id"] == "abc"
    made = await server.client.get("/health", headers={"x-request-id": "a\tb"})
    assert len(made.headers["x-request-id"]) == 16


async def test_cors_is_allowed(server: ScriptedServer) -> None:
    headers = {"origin": "http://x", "access-control-request-method": "POST"}
    got = await server.client.options(CHAT, headers=headers)
    assert got.status_code == 200 and got.headers["access-control-allow-origin"] == "*"


async def test_the_openapi_document_matches_the_routes(server: ScriptedServer) -> None:
    document = (await server.client.get("/openapi.json")).json()
    for route in server.app.routes:
        if getattr(route, "include_in_schema", False) and "{" not in route.path:
            assert route.path in document["paths"], route.path
    chat = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    name = chat["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert schema["additionalProperties"] is True and "messages" in schema["required"]
    events = document["paths"]["/live/events"]["get"]["responses"]["200"]
    assert list(events["content"]) == ["text/event-stream"]
    identifiers = [
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    ]
    assert len(identifiers) == len(set(identifiers))


async def test_metrics_only_by_flag(server: ScriptedServer, toy_folder: Any) -> None:
    assert (await server.client.get("/metrics")).status_code == 404
    async with scripted_server(
        toy_folder, {}, enable_metrics=True, collect_tokens_histogram=True
    ) as made:
        await made.post(CHAT, **PLAIN)
        await made.client.get("/health_generate")
        text = (await made.client.get("/metrics")).text
        labels = 'engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"'
        assert f"sglang:num_requests_total{{{labels}}} 1.0" in text
        for name in ("time_to_first_token_seconds", "generation_tokens_histogram"):
            assert f"sglang:{name}_count{{{labels}}} 1.0" in text
        assert "sglang:token_usage{" in text


async def test_metrics_do_not_wait_for_a_busy_engine(
    toy_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.entrypoints.http.admin.metrics.ANSWER_S", 0.01)
    async with scripted_server(toy_folder, {}, enable_metrics=True, tp_size=2) as made:
        never = asyncio.get_running_loop().create_future
        monkeypatch.setattr(made.engine.intake, "control_each", lambda *_, **__: never())
        text = (await asyncio.wait_for(made.client.get("/metrics"), 60.0)).text
        assert "sglang:token_usage{" in text


async def test_admin_routes_are_closed_on_a_public_address(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, host="0.0.0.0") as made:
        for path in sorted(ADMIN_PATHS):
            assert (await made.client.post(path)).status_code == 403, path
            assert (await made.client.post(path + "/")).status_code == 403, path
        assert (await made.post(CHAT, **PLAIN)).status_code == 200


async def test_anthropic_and_ollama_read_refusals_in_their_own_form(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}, api_key="k") as made:
        refused = (await made.post("/v1/messages")).json()
        assert refused["type"] == "error" and refused["error"]["type"] == "authentication_error"
        assert isinstance((await made.post("/api/chat")).json()["error"], str)
        key = {"x-api-key": "k"}
        assert (await made.client.get("/v1/models", headers=key)).status_code == 200
        odd = {"authorization": b"Bearer \xff\xfe"}
        assert (await made.client.get("/v1/models", headers=odd)).status_code == 401


async def test_origins_by_flag(toy_folder: Any) -> None:
    ask = {"origin": "http://b"}
    for option, allowed in (("http://a, http://b", "http://b"), ("http://a", None), ("none", None)):
        async with scripted_server(toy_folder, {}, cors_allowed_origins=option) as made:
            got = await made.client.get("/v1/models", headers=ask)
            assert got.headers.get("access-control-allow-origin") == allowed


async def test_an_internal_error_is_logged_once(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr("radixlm.entrypoints.http.native.generate.read_generate", fail)
    async with listening(server) as port, httpx.AsyncClient() as client:
        got = await client.post(f"http://127.0.0.1:{port}/generate", json={"text": "hi"})
    assert got.status_code == 500 and "a fault" not in got.text
    assert [record.getMessage() for record in caplog.records] == ["POST /generate failed"]


async def test_calls_that_end_with_the_server_are_no_errors(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("radixlm.entrypoints.http.native.generate.read_generate", cancelled)
    async with listening(server) as port, httpx.AsyncClient() as client:
        await client.post(f"http://127.0.0.1:{port}/generate", json={"text": "hi"})
    assert not caplog.records
