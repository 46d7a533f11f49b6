"""The access line: what it tells equals what the answer tells."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.base.log import ACCESS

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", ACCESS)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == ACCESS]


def _fields(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [r for r in caplog.records if r.name == ACCESS]
    caplog.clear()
    return dict(record.__dict__["fields"])


async def test_a_line_tells_tokens_times_and_the_client_s_id(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "sum please"}], "stream": stream, "n": 2}
        headers = {"X-Request-Id": "mine-7"}
        got = await server.client.post(CHAT, json=body, headers=headers)
        assert got.status_code == 200
        (line,) = _lines(caplog)
        fields = _fields(caplog)
        if not stream:
            usage = got.json()["usage"]
        assert fields["prompt_tokens"] == usage["prompt_tokens"]
        assert fields["completion_tokens"] == usage["completion_tokens"]
        assert 0 <= fields["queue_seconds"] <= fields["first_token_seconds"] <= fields["seconds"]
        assert line.startswith(f"POST {CHAT} 200 in ") and line.endswith("; id mine-7")
        assert f"{usage['prompt_tokens']} tokens in (" in line and "client left" not in line


async def test_cached_tokens_count(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 2}}
    for wanted in (0, 36):
        got = await server.post("/generate", **body)
        assert got.json()["meta_info"]["cached_tokens"] == wanted
        fields = _fields(caplog)
        assert (fields["prompt_tokens"], fields["cached_tokens"]) == (40, wanted)


async def test_requests_without_tokens_and_refused_ones(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    await server.client.get("/v1/models")
    assert _lines(caplog)[-1].startswith("GET /v1/models 200 in ")
    await server.post(CHAT, messages=[])
    assert _lines(caplog)[-1].startswith(f"POST {CHAT} 400 in ")
    await server.client.get("/no%0A%1b where?secret=1")
    assert _lines(caplog)[-1].startswith("GET /no%0A%1B%20where 404 in ")
    assert "secret" not in caplog.text


async def test_probes_and_scrapers_are_quiet(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/health", "/ready", "/health_generate", "/metrics", "/get_load"):
        await server.client.get(path)
    assert _lines(caplog) == []
    caplog.set_level("WARNING", ACCESS)
    await server.client.get("/v1/models")
    assert _lines(caplog) == [], "--log-level-http warning"


async def test_a_client_that_leaves(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"max_new_tokens": 1500, "ignore_eos": True}
    call = asyncio.create_task(server.post("/generate", text="forever", sampling_params=params))
    async with asyncio.timeout(60):
        while not server.engine.intake.requests:
            await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    fields = _fields(caplog)
    assert fields["status"] == 499 and fields["client_left"]


async def test_a_request_that_breaks(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(server.engine.intake, "submit", broken)
    assert (await server.post("/generate", text="hi")).status_code == 500
    assert _fields(caplog)["status"] == 500


async def test_uvicorn_writes_no_second_line(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert [r.name for r in caplog.records if "/v1/models" in r.getMessage()] == [ACCESS]


async def test_request_logs_have_the_words_of_sglang(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tests and scripts look for them."""
    monkeypatch.setattr("radixlm.observe.requestlog.SHORT_CHARS", 200)
    caplog.set_level("INFO", "radixlm.requests")
    await server.post("/configure_logging", log_requests=True, log_requests_level=2)
    body = {
        "input_ids": server.state.require_tokenizer().encode('a "b"\n', False),
        "sampling_params": {"max_new_tokens": 2},
    }
    headers = {"X-Request-Id": "mine-8", "X-SMG-Routing-Key": "a b"}
    assert (await server.client.post("/generate", json=body, headers=headers)).status_code == 200
    received, finished = [r.getMessage() for r in caplog.records if r.name == "radixlm.requests"]
    start = "obj=GenerateReqInput(rid='mine-8', text='a \"b\"\\n', sampling_params={"
    assert received.startswith(f"Receive: {start}") and "'max_new_tokens': 2" in received
    assert received.endswith("), headers={'x-smg-routing-key': 'a b'}")
    obj, out = finished.removeprefix("Finish: ").split(", out=")
    assert obj == received.removeprefix("Receive: ")
    told = ast.literal_eval(out)
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert told["text"] == "Hello" and len(told["output_ids"]) == 2
    caplog.clear()
    chat = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 1}
    assert (await server.post("/v1/chat/completions", **chat)).status_code == 200
    body = next(r.getMessage() for r in caplog.records if "OpenAI" in r.getMessage())
    half = "x" * 100
    assert body == (
        f"Receive OpenAI: obj={{'max_tokens': 1, 'messages': [{{'role': 'user', 'content': '{half}'"
        f" ... '{half}'}}]}}"
    )
    caplog.clear()
    await server.post("/configure_logging", log_requests_level=0)
    await server.post("/v1/chat/completions", **chat)
    lines = "".join(r.getMessage() for r in caplog.records if r.name == "radixlm.requests")
    assert "xxx" not in lines and "sampling_params" not in lines and "meta_info" in lines


async def test_short_requests_may_leave_no_line_and_headers_may_be_named(
    toy_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_LOG_REQUEST_EXCEEDED_MS", "60000")
    monkeypatch.setenv("SGLANG_LOG_REQUEST_HEADERS", "X-One, X-Two")
    caplog.set_level("INFO", "radixlm.requests")
    async with scripted_server(toy_folder, {}, log_requests=True) as made:
        headers = {"X-Two": "2"}
        got = await made.client.post("/generate", json={"text": "hi"}, headers=headers)
        assert got.status_code == 200
    (line,) = [r.getMessage() for r in caplog.records if r.name == "radixlm.requests"]
    assert line.startswith("Receive: ") and line.endswith("headers={'x-two': '2'}")
