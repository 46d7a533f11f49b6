"""/start_profile and /stop_profile: what reaches the engine, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer

from radixlm.base.errors import InvalidRequest


async def test_both_verbs_reach_the_engine(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    control = server.engine.executor.control
    monkeypatch.setattr(
        server.engine.executor, "control", lambda v, a: seen.append((v, a)) or control(v, a)
    )
    got = await server.post(
        "/start_profile", output_dir="/tmp/x", num_steps=3, activities=["CPU"], with_stack=True
    )
    assert (got.status_code, got.text) == (200, "Start profiling.\n")
    got = await server.client.get("/stop_profile")
    assert got.status_code == 200 and got.text.startswith("Stop profiling.")
    assert [verb for verb, _ in seen] == ["start_profile", "stop_profile"]
    args = seen[0][1]
    assert (args["output_dir"], args["num_steps"], args["activities"]) == ("/tmp/x", 3, ["CPU"])
    assert args["with_stack"] is True and args["start_step"] is None


async def test_an_empty_body_or_a_query_suffices(server: ScriptedServer) -> None:
    assert (await server.client.post("/start_profile")).status_code == 200
    assert (await server.client.get("/start_profile?num_steps=2")).status_code == 200


async def test_refusals_reach_the_client(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await server.post("/start_profile", num_steps=0)).status_code == 400

    def refuse(verb: str, args: dict[str, Any]) -> None:
        raise InvalidRequest("no profile is being taken")

    monkeypatch.setattr(server.engine.executor, "control", refuse)
    got = await server.client.post("/stop_profile")
    assert got.status_code == 400 and "no profile" in got.text


async def test_a_trace_is_a_download_once_it_is_whole(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXLM_PROFILER_DIR", str(tmp_path))
    name, packed = "page-1-TP-0.trace.json.gz", gzip.compress(b'{"traceEvents": []}' * 999)
    (tmp_path / "secret.json").write_text("{}")
    for taken in (len(packed) - 9, len(packed)):
        (tmp_path / name).write_bytes(packed[:taken])
        got = await server.client.get(f"/live/profiles/{name}")
        assert got.status_code == (200 if taken == len(packed) else 404)
    assert got.content == packed
    (tmp_path / "link.trace.json.gz").symlink_to(tmp_path / name)
    for refused in ("secret.json", "link.trace.json.gz", "none.trace.json.gz", "..%2fx"):
        assert (await server.client.get(f"/live/profiles/{refused}")).status_code == 404
