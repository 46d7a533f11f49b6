"""Objects belong to the API key that made them."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.base.errors import ConfigError
from radixlm.base.private_files import close_to_others, make_private_folder, write_private
from radixlm.config import conflicts
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.http.responses.store import SqliteStore, Stored

LINE = (
    b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", '
    b'"body": {"prompt": "a", "max_tokens": 2}}'
)


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    return path


@pytest_asyncio.fixture
async def shared(toy_folder: Path, tmp_path: Path, keys: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(
        toy_folder,
        {"forever": "la "},
        api_key_file=str(keys),
        admin_api_key="root",
        file_storage_path=str(tmp_path / "storage"),
    ) as made:
        yield made


async def _upload(client: httpx.AsyncClient, key: str) -> Any:
    files = {"file": ("a.jsonl", LINE)}
    made = await client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=_as(key))
    assert made.status_code == 200, made.text
    return made.json()


async def _statuses(client: httpx.AsyncClient, method: str, path: str) -> list[int]:
    """What alice, bob and the administrator get."""
    keys = ("alice", "bob", "root")
    return [(await client.request(method, path, headers=_as(k))).status_code for k in keys]


async def test_files_and_batches(shared: ScriptedServer) -> None:
    client = shared.client
    file = await _upload(client, "alice")
    assert "owner" not in file
    path = f"/v1/files/{file['id']}"
    assert await _statuses(client, "GET", path) == [200, 404, 200]
    assert await _statuses(client, "GET", f"{path}/content") == [200, 404, 200]
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    assert (await client.post("/v1/batches", json=body, headers=_as("bob"))).status_code == 404
    made = (await client.post("/v1/batches", json=body, headers=_as("alice"))).json()
    assert "owner" not in made
    batch = f"/v1/batches/{made['id']}"
    assert await _statuses(client, "GET", batch) == [200, 404, 200]
    assert (await client.post(f"{batch}/cancel", headers=_as("bob"))).status_code == 404
    while (record := (await client.get(batch, headers=_as("alice"))).json())["status"] in (
        "validating",
        "in_progress",
        "finalizing",
    ):
        await asyncio.sleep(0)
    assert record["status"] == "completed"
    output = f"/v1/files/{record['output_file_id']}/content"
    assert await _statuses(client, "GET", output) == [200, 404, 200]
    for listed in ("/v1/files", "/v1/batches"):
        assert (await client.get(listed, headers=_as("bob"))).json()["data"] == []
        data = (await client.get(listed, headers=_as("alice"))).json()["data"]
        assert data and all("owner" not in record for record in data)
    assert (await client.delete(path, headers=_as("bob"))).status_code == 404
    assert (await client.delete(path, headers=_as("alice"))).status_code == 200


async def test_responses(shared: ScriptedServer) -> None:
    client = shared.client
    body: dict[str, Any] = {"input": "hi", "max_output_tokens": 4}
    made = (await client.post("/v1/responses", json=body, headers=_as("alice"))).json()
    path = f"/v1/responses/{made['id']}"
    assert await _statuses(client, "GET", path) == [200, 404, 200]
    assert await _statuses(client, "GET", f"{path}/input_items") == [200, 404, 200]
    body["previous_response_id"] = made["id"]
    assert (await client.post("/v1/responses", json=body, headers=_as("bob"))).status_code >= 400
    assert (await client.post("/v1/responses", json=body, headers=_as("alice"))).is_success
    assert (await client.delete(path, headers=_as("bob"))).status_code == 404
    assert (await client.get(path, headers=_as("alice"))).status_code == 200


async def test_abort_reaches_own_requests(shared: ScriptedServer) -> None:
    client = shared.client

    def start(key: str) -> asyncio.Task[httpx.Response]:
        body = {"text": "forever", "rid": f"of {key}", "sampling_params": {"max_new_tokens": 1500}}
        return asyncio.create_task(client.post("/generate", json=body, headers=_as(key)))

    async def abort(key: str, **body: Any) -> int:
        answer = await client.post("/abort_request", json=body, headers=_as(key))
        return int(answer.json()["num_aborted"])

    shared.engine.executor.is_slow = True
    tasks = [start("alice"), start("bob")]
    while len(shared.engine.intake.requests) < 2:
        await asyncio.sleep(0)
    assert await abort("bob", rid="of alice") == 0
    assert await abort("bob", abort_all=True) == 1
    await tasks[1]
    assert list(shared.engine.intake.requests) == ["of alice"]
    assert await abort("root", abort_all=True) == 1
    await tasks[0]


async def test_sessions(shared: ScriptedServer) -> None:
    client = shared.client
    name = (await client.post("/open_session", json={}, headers=_as("alice"))).json()
    body = {"text": "a", "session_params": {"id": name}, "sampling_params": {"max_new_tokens": 1}}
    assert (await client.post("/generate", json=body, headers=_as("bob"))).status_code == 400
    assert (await client.post("/generate", json=body, headers=_as("alice"))).status_code == 200
    close = {"session_id": name}
    assert (await client.post("/close_session", json=close, headers=_as("bob"))).is_success
    assert (await client.post("/generate", json=body, headers=_as("alice"))).status_code == 200
    assert (await client.post("/close_session", json=close, headers=_as("alice"))).is_success
    assert (await client.post("/generate", json=body, headers=_as("alice"))).status_code == 400


async def test_with_several_keys_only_the_operators_opens_admin_routes(
    toy_folder: Path, keys: Path
) -> None:
    async with scripted_server(toy_folder, {}, api_key_file=str(keys)) as made:
        answer = await made.client.post("/flush_cache", headers=_as("alice"))
        assert answer.status_code == 403 and "--admin-api-key" in answer.text
    async with scripted_server(toy_folder, {}, api_key_file=str(keys), api_key="op") as made:
        assert (await made.client.post("/flush_cache", headers=_as("op"))).status_code == 200
        assert (await made.client.post("/flush_cache", headers=_as("bob"))).status_code == 403


@pytest.mark.parametrize(("by", "cached"), [("none", 4), ("key", 0)])
async def test_caches_by_key(toy_folder: Path, keys: Path, by: str, cached: int) -> None:
    options = {"api_key_file": str(keys), "isolate_cache_by": by}
    async with scripted_server(toy_folder, {}, **options) as made:

        async def hit(key: str) -> int:
            body = {"input_ids": [7] * 9, "sampling_params": {"max_new_tokens": 1}}
            answer = await made.client.post("/generate", json=body, headers=_as(key))
            return int(answer.json()["meta_info"]["cached_tokens"])

        assert await hit("alice") == 0
        assert (await hit("bob") >= 4) == (cached > 0)
        assert await hit("alice") >= 4


def test_caches_by_key_need_keys() -> None:
    config = ServerConfig.from_kwargs(model_path="m", isolate_cache_by="key")
    with pytest.raises(ConfigError, match="--api-key-file"):
        conflicts.check(config)


async def test_a_cache_salt_is_no_part_of_an_extra_key(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}) as made:

        async def hit(**fields: Any) -> int:
            body = {"input_ids": [7] * 9, "sampling_params": {"max_new_tokens": 1}} | fields
            return int((await made.post("/generate", **body)).json()["meta_info"]["cached_tokens"])

        assert await hit(extra_key="A\0B") == 0
        assert await hit(extra_key="A", cache_salt="B") == 0
        assert await hit(extra_key="A", cache_salt="B") >= 4


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_what_is_stored_is_closed_to_other_users(
    shared: ScriptedServer, tmp_path: Path
) -> None:
    await _upload(shared.client, "alice")
    body = {"input": "hi", "max_output_tokens": 4}
    await shared.client.post("/v1/responses", json=body, headers=_as("alice"))
    paths = [tmp_path / "storage", *(tmp_path / "storage").rglob("*")]
    assert {_mode(path) for path in paths if path.is_dir()} == {0o700}
    assert {_mode(path) for path in paths if path.is_file()} == {0o600}
    assert len(paths) >= 5


def test_what_earlier_versions_stored_is_closed(tmp_path: Path) -> None:
    old = tmp_path / "files"
    old.mkdir(mode=0o755)
    (old / "a").write_text("x")
    (old / "a").chmod(0o644)
    close_to_others(old)
    assert (_mode(old), _mode(old / "a")) == (0o700, 0o600)
    write_private(old / "b", b"1")
    write_private(old / "b", b"2", is_appended=True)
    assert (old / "b").read_bytes() == b"12" and _mode(old / "b") == 0o600
    make_private_folder(tmp_path / "new" / "er")
    assert _mode(tmp_path / "new") == 0o700


def test_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE responses "
            "(id TEXT PRIMARY KEY, made REAL, response BLOB, items BLOB, messages BLOB)"
        )
        db.execute("INSERT INTO responses VALUES ('a', 1e18, '{}', '[]', '[]')")
        db.execute("CREATE TABLE unfinished (id TEXT PRIMARY KEY)")
        db.execute("INSERT INTO unfinished VALUES ('a')")
    db.close()
    store = SqliteStore(path)
    assert store.get("a") == Stored({}, [], []) and len(store.unfinished()) == 1
    store.put(Stored({"id": "b"}, [], [], "me"))
    assert store.get("b") == Stored({"id": "b"}, [], [], "me")
    assert _mode(path) == 0o600
