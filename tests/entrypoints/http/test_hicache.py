"""Operator routes of the hierarchical cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.wire.replies import ControlReply

STATS = {
    "tiers": [
        {"name": "host", "backend": None, "pages": 3},
        {"name": "storage", "backend": "file", "pages": 4},
    ],
    "errors": {},
}
PATH = "/hicache/storage-backend"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The engine's commands; it refuses the backend s3."""
    calls: list[dict[str, Any]] = []

    async def control(_: Any, verb: str, **args: Any) -> ControlReply:
        calls.append({"command": verb, **args})
        if args.get("backend") == "s3":
            return ControlReply("x", False, "a storage is attached; detach it first", None)
        return ControlReply("x", True, "", STATS if args["action"] == "stats" else {"done": 1})

    monkeypatch.setattr("radixlm.intake.tokenizer_manager.TokenizerManager.control", control)
    return calls


async def test_without_the_flag_all_of_them_refuse(server: ScriptedServer) -> None:
    for method, path in (("get", "/clear_hicache_storage_backend"), ("get", PATH),
                         ("delete", PATH), ("get", "/get_hicache_l3_cache_layout")):  # fmt: skip
        answer = await server.client.request(method, path)
        assert answer.status_code == 400 and "--enable-hierarchical-cache" in answer.text


async def test_storage_is_cleared_shown_attached_and_detached(
    toy_folder: Path, asked: list[dict[str, Any]]
) -> None:
    async with scripted_server(toy_folder, {}, enable_hierarchical_cache=True) as server:
        for method in ("get", "post"):
            answer = await server.client.request(method, "/clear_hicache_storage_backend")
            assert answer.status_code == 200 and "cleared" in answer.text
        assert (await server.client.post(f"{PATH}/clear")).status_code == 200
        shown = (await server.client.get(PATH)).json()
        assert shown["is_attached"] and shown["tiers"] == STATS["tiers"]
        assert shown["hicache_storage_backend"] == "file"
        assert shown["hicache_write_policy"] == "write_through"
        body = {"hicache_storage_backend": "file"}
        assert (await server.client.put(PATH, json=body)).json()["status"] == "ok"
        assert (await server.client.delete(PATH)).json()["status"] == "ok"
        assert (await server.client.get("/get_hicache_l3_cache_layout")).json() == {"done": 1}
    assert [call["action"] for call in asked] == [
        *("clear", "clear", "clear", "stats", "attach", "detach", "layout")
    ]
    assert asked[0]["tier"] == "storage" and asked[4]["backend"] == "file"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "hicache_storage_backend"),
        ({"hicache_storage_backend": "tape"}, "hicache_storage_backend"),
        (
            {"hicache_storage_backend": "file", "hicache_write_policy": "write_back"},
            "hicache_write_policy",
        ),
        ({"hicache_storage_backend": "s3"}, None),
    ],
)
async def test_a_bad_storage_is_refused(
    toy_folder: Path, asked: list[dict[str, Any]], body: dict[str, Any], param: str | None
) -> None:
    async with scripted_server(toy_folder, {}, enable_hierarchical_cache=True) as server:
        answer = await server.client.put(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
