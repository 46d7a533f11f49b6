"""The wall clock jumps a day forwards and backwards. Deadlines, streams and health do not change,
because they use the monotonic clock only."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import radixlm
from tests.chaos.simulation import World
from tests.fakes.executor import reference
from tests.fakes.http_server import ScriptedServer

DAY_S = 86_400.0
SOURCE = Path(radixlm.__file__).parent
# the wall clock is right for dates that clients and people read
DATES = frozenset(
    """
    continuation/stream_journal.py lang/trace.py router/history/history.py
    router/logs.py entrypoints/models.py engine/packed_weights.py
    entrypoints/http/admin/request_log.py entrypoints/native/response.py
    distributed/record.py engine/crash_dump.py engine/profile.py
    entrypoints/http/batches/files.py
    entrypoints/http/batches/runner.py kv_events/publisher.py tiers/stores/file.py
    entrypoints/http/admin/info.py entrypoints/http/openai/chat.py
    entrypoints/http/openai/completions.py
    entrypoints/http/pooling/embeddings.py entrypoints/http/responses/events.py
    entrypoints/http/live.py entrypoints/profile.py observe/tracing.py router/page.py
    entrypoints/http/pooling/score.py entrypoints/http/responses/conversations.py
    entrypoints/http/responses/store.py entrypoints/http/speech/routes.py entrypoints/http/state.py
    """.split()
)


class Jumping:
    """A wall clock that is a day wrong, in another direction at each read."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._real = time.time

    def __call__(self) -> float:
        self.num_asked += 1
        return self._real() + (DAY_S if self.num_asked % 2 else -DAY_S)


def test_only_dates_are_read_from_the_wall_clock() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith("bench/"):
            continue
        text = path.read_text(encoding="utf-8")
        if "time.time" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            is_time = isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns")
            if is_time and isinstance(node.value, ast.Name) and node.value.id == "time":
                found.add(name)
    assert found <= DATES, found - DATES


async def test_streams_and_deadlines_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", Jumping())
    world = World(5, tmp_path, num_pages=64)
    clients = [world.submit([3 + i, 4], 20) for i in range(5)]
    for _ in range(10):
        world.tick()
    world.die()
    for _ in range(300):
        world.tick()
    for client in clients:
        client.read()
        assert client.ids == reference(client.prompt, client.max_new, True)
    world.check_invariants()


async def test_requests_with_a_timeout_are_answered(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Jumping()
    monkeypatch.setattr(time, "time", clock)
    for _ in range(3):
        params = {"max_new_tokens": 3}
        got = await server.post("/generate", text="hi", timeout=60, sampling_params=params)
        assert (
            got.status_code == 200 and got.json()["meta_info"]["finish_reason"]["type"] != "abort"
        )
        assert 0 <= got.json()["meta_info"]["e2e_latency"] < 60
        assert (await server.client.get("/health_generate")).status_code == 200
        info = (await server.client.get("/get_server_info")).json()
        assert 0 <= info["uptime_s"] < 3600
    chat = await server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 200 and clock.num_asked > 0, "created is a date"
