"""Disks that fail for a while: nothing is lost that was stored, batches wait, and the error names
the flag of the folder. Faults are raised where Python calls the system."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from radixlm.base.errors import Overloaded
from radixlm.entrypoints.http.admin.request_log import _append
from radixlm.entrypoints.http.batches import runner
from radixlm.entrypoints.http.batches.files import Files
from radixlm.entrypoints.http.errors import disk_fault
from radixlm.entrypoints.http.responses.store import SqliteStore, Stored
from radixlm.observe.requestlog import RequestLines
from tests.chaos.test_full_disk import CHAT, _line, _upload, disk, fill
from tests.fakes.http_server import scripted_server

__all__ = ["disk"]

Patch = pytest.MonkeyPatch
BATCH_ID = "batch_" + "0" * 24


def _unreadable(patch: Patch, folder: Path) -> None:
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.is_relative_to(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    patch.setattr(Path, "read_bytes", read_bytes)


def _read_only(patch: Patch, folder: Path) -> None:
    open_ = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_written and Path(os.fspath(path)).is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_(path, flags, *args, **options)

    patch.setattr(os, "open", opened)


def _no_room_for_the_output(patch: Patch, folder: Path) -> None:
    def create(*args: Any) -> None:
        raise Overloaded("it cannot be stored") from OSError(errno.ENOSPC, "full")

    patch.setattr(Files, "create", create)


@pytest.mark.parametrize("fault", [_unreadable, _read_only, _no_room_for_the_output])
async def test_a_batch_waits_until_its_disk_works(
    toy_folder: Path, tmp_path: Path, monkeypatch: Patch, fault: Callable[[Patch, Path], None]
) -> None:
    monkeypatch.setattr(runner, "FULL_DISK_S", 0.0)
    waits: list[bool] = []
    run = runner.Batches._run_unless_disk_fails

    async def watched(batches: Any, server_state: Any, record: Any) -> bool:
        waits.append(not await run(batches, server_state, record))
        return not waits[-1]

    monkeypatch.setattr(runner.Batches, "_run_unless_disk_fails", watched)
    names = [f"line-{i}" for i in range(5)]
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        file_id = (await _upload(server, "\n".join(map(_line, names)).encode())).json()["id"]
        order = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await server.post("/v1/batches", **order)).json()
        with monkeypatch.context() as patch:  # before the task of the batch runs
            fault(patch, tmp_path)
            async with asyncio.timeout(120):
                while sum(waits) < 2:
                    await asyncio.sleep(0)
        async with asyncio.timeout(120):
            while True:
                found = (await server.client.get(f"/v1/batches/{batch['id']}")).json()
                if found["status"] not in runner.RUNNING:
                    break
                await asyncio.sleep(0)
        assert found["status"] == "completed" and found["errors"] is None
        assert found["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        content = await server.client.get(f"/v1/files/{found['output_file_id']}/content")
        rows = [json.loads(line) for line in content.text.splitlines()]
        assert sorted(row["custom_id"] for row in rows) == names


def test_answers_that_cannot_be_read_are_kept(tmp_path: Path, monkeypatch: Patch) -> None:
    batches = runner.Batches(tmp_path, Files(tmp_path))
    answers = tmp_path / f"{BATCH_ID}.out"
    answers.write_bytes(b'{"custom_id": "a"}\n{"custom')
    record: dict[str, Any] = {"id": BATCH_ID, "request_counts": {}}
    with monkeypatch.context() as patch, pytest.raises(OSError):
        _unreadable(patch, tmp_path)
        batches._answered(record)
    assert batches._answered(record) == {"a"} and record["request_counts"]["completed"] == 1
    assert answers.read_bytes() == b'{"custom_id": "a"}\n'


async def test_a_file_that_cannot_be_read_is_not_taken_for_gone(
    toy_folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    async with scripted_server(toy_folder, {}, file_storage_path=str(tmp_path)) as server:
        file_id = (await _upload(server, b"x")).json()["id"]
        paths = [f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", "/v1/files"]
        with monkeypatch.context() as patch:
            _unreadable(patch, tmp_path)
            for path in paths:
                answer = await server.client.get(path)
                assert answer.status_code == 503 and answer.headers["retry-after"], path
                assert "--file-storage-path" in answer.json()["error"]["message"]
        assert [(await server.client.get(path)).status_code for path in paths] == [200] * 3
        with monkeypatch.context() as patch:
            _read_only(patch, tmp_path)
            answer = await _upload(server, b"y")
            assert answer.status_code == 503 and "--file-storage-path" in answer.text


class _FailingDatabase:
    """A connection whose second statement of a put fails."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
        if "unfinished" in statement:
            raise sqlite3.OperationalError("disk I/O error")
        return self.db.execute(statement, *args)

    def __enter__(self) -> Any:
        return self.db.__enter__()

    def __exit__(self, *exc: Any) -> bool:
        return self.db.__exit__(*exc)


def test_a_store_that_failed_is_written_again(tmp_path: Path) -> None:
    """What was begun is taken back: an open transaction would lock out other processes too."""
    stores = [SqliteStore(tmp_path / "responses.sqlite") for _ in range(2)]
    stored = Stored({"id": "resp_1", "status": "completed"}, [], [], "")
    db = stores[0]._db
    stores[0]._db = cast("sqlite3.Connection", _FailingDatabase(db))
    with pytest.raises(sqlite3.OperationalError) as caught:
        stores[0].put(stored)
    assert "--file-storage-path" in str(disk_fault(caught.value, "/v1/responses"))
    stores[0]._db = db
    assert stores[0].get("resp_1") is None
    for store in (*stores[::-1], *stores):
        store.put(stored)
    assert all(store.get("resp_1") == stored for store in stores)
    for store in stores:
        store.close()


def test_a_full_disk_tears_no_line_of_metrics(disk: Path) -> None:
    path, line = disk / "metrics", b"x" * 3000 + b"\n"
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - 8192)
    lines = 0
    with pytest.raises(OSError, match="No space"):
        while True:
            _append(path, line)
            lines += 1
    filler.unlink()
    _append(path, line)
    assert lines and path.read_bytes() == line * (lines + 1)


def test_lost_lines_of_requests_are_told_once(
    disk: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = RequestLines([str(disk / "logs")], "json")
    told = []
    with caplog.at_level(logging.WARNING, "radixlm.requests"):
        for _ in range(2):
            filler = fill(disk)
            for i in range(50):
                lines.finished("K", {"rid": f"{i}", "text": "y" * 999}, {}, {}, True)
            told.append(caplog.text.count("--log-requests-target"))
            filler.unlink()
            lines.finished("K", {"rid": "last"}, {}, {}, True)
    lines.close()
    assert told == [1, 2] and not capsys.readouterr().err


async def test_a_dump_on_a_disk_that_fails_names_its_flag(
    toy_folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "dumps"
    async with scripted_server(toy_folder, {}, crash_dump_folder=str(folder)) as server:
        with monkeypatch.context() as patch:
            _read_only(patch, folder)
            answer = await server.post("/dump_requests")
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "--crash-dump-folder" in answer.json()["error"]["message"]
        assert (await server.post("/dump_requests")).status_code == 200
        for path in [*folder.iterdir(), folder]:
            path.unlink() if path.is_file() else path.rmdir()
        folder.write_bytes(b"")
        answer = await server.post("/dump_requests")
        assert answer.status_code == 507 and "--crash-dump-folder" in answer.text
