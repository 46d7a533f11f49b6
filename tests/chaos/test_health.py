"""Health is correct while a long prompt is computed, while the server drains and while its engine
is away: no 503 during a long prefill, no 200 with a dead engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from radixlm.base.errors import Overloaded
from tests.fakes.http_server import ScriptedServer, listening


async def _statuses(server: ScriptedServer) -> tuple[int, int]:
    return tuple([(await server.client.get(path)).status_code for path in ("/health", "/ready")])  # type: ignore[return-value]


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.001)


async def test_a_long_prefill_stays_healthy(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine makes a step when the test allows it."""
    monkeypatch.setattr("radixlm.scheduler.loop.BEAT_S", 0.02)
    intake, executor = server.engine.intake, server.engine.executor
    await server.post("/generate", text="hi", sampling_params={"max_new_tokens": 1})
    steps, sample = threading.Semaphore(0), executor.sample
    monkeypatch.setattr(executor, "sample", lambda *args: steps.acquire() and sample(*args))
    params = {"max_new_tokens": 2}
    call = server.post("/generate", input_ids=[5, 6] * 900, sampling_params=params)
    long = asyncio.create_task(call)  # the prompt takes eight steps
    try:
        await _until(lambda: bool(server.engine.scheduler.planner.running))
        first_s = intake.beat_s
        assert await _statuses(server) == (200, 200)
        probe = asyncio.create_task(server.client.get("/health_generate"))
        await _until(lambda: len(intake.requests) == 2)
        await asyncio.sleep(0.03)  # a heartbeat is due
        steps.release(8)
        assert (await asyncio.wait_for(probe, 60)).status_code == 200
        assert not long.done(), "the first token of anybody answers for the engine"
        await _until(lambda: intake.beat_s > first_s)
        assert not long.done() and await _statuses(server) == (200, 200)
    finally:
        steps.release(1000)
    assert (await long).status_code == 200


async def test_no_engine_is_not_ready_and_a_draining_server_is_not_healthy(
    server: ScriptedServer,
) -> None:
    intake = server.engine.intake
    intake.lose_engine()
    assert await _statuses(server) == (200, 503)
    assert (await server.client.get("/health_generate")).status_code == 503
    intake.become_ready({"max_total_num_tokens": 4096, "context_len": 2048})
    assert await _statuses(server) == (200, 200)
    intake.leaving.set()
    assert await _statuses(server) == (503, 503)
    refused = await server.post("/generate", text="hi")
    assert refused.status_code == Overloaded.status and int(refused.headers["Retry-After"]) >= 1


async def test_who_waits_at_ready_learns_at_once_that_the_server_shuts_down(
    server: ScriptedServer,
) -> None:
    intake = server.engine.intake
    intake.become_ready({"max_total_num_tokens": 4096, "context_len": 2048})
    assert (await server.client.get("/ready?wait_s=0.001")).status_code == 200
    waiting = asyncio.ensure_future(server.client.get("/ready?wait_s=60"))
    await asyncio.sleep(0)
    intake.leaving.set()
    answer = await asyncio.wait_for(waiting, 20)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
    assert (await server.client.get("/ready?wait_s=61")).status_code == 400


@pytest.mark.parametrize("level", [0, 1, 2, 3])
async def test_the_request_log_has_the_configured_detail(
    server: ScriptedServer,
    level: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metadata, sampling parameters, the start of the text, or all text; each line with its id."""
    await server.post("/configure_logging", log_requests=True, log_requests_level=level)
    monkeypatch.setattr("radixlm.observe.requestlog.SHORT_CHARS", 200)
    prompt = "BEGIN" + "xy " * 99 + "MIDDLE" + " zw" * 99
    with caplog.at_level(logging.INFO, "radixlm.requests"):
        params = {"max_new_tokens": 2, "temperature": 0.25}
        got = await server.post("/generate", text=prompt, rid="my-id\n1", sampling_params=params)
        assert got.status_code == 400, "an id cannot forge a line"
        got = await server.post("/generate", text=prompt, rid="my-id", sampling_params=params)
        assert got.status_code == 200
    await server.post("/configure_logging", log_requests=False)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all("my-id" in line for line in lines)
    shown = "\n".join(lines)
    assert ("0.25" in shown) == (level >= 1)
    assert ("BEGIN" in shown) == (level >= 2)
    assert ("MIDDLE" in shown) == (level >= 3)
    assert "'finish_reason': {'type': 'length'" in shown or "{'type': 'stop'" in shown


async def test_ids_of_requests_come_back(server: ScriptedServer) -> None:
    got = await server.client.get("/health", headers={"X-Request-Id": "mine-7"})
    assert got.headers["x-request-id"] == "mine-7"
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: a\tb\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"x-request-id: " in head and b"a\tb" not in head
        writer.close()
