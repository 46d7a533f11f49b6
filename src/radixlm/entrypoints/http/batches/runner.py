"""Batches: files of requests that are answered in the background, across restarts.

Each batch is a JSON record and two growing files of answers. A batch that was running when
the process ended continues with the lines that have no answer yet. The process that runs a batch
has the lock of its file ".lock"; another one that shall end it makes a file ".cancel".
"""

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from radixlm.base.errors import InvalidRequest, NotFound, RequestError
from radixlm.base.private_files import (
    FILE_MODE,
    lock_file,
    make_private_folder,
    write_private,
)
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.batches.files import Files, read_record, read_unless_gone, write_json
from radixlm.entrypoints.http.batches.lines import Line, answer_line, read_line
from radixlm.entrypoints.http.errors import disk_fault
from radixlm.entrypoints.http.middleware import fair_share_key, forget_request_id
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.call import begin_call
from radixlm.intake.identity import Identity, identity, set_identity

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
MAX_LINES = 50_000
MAX_ERRORS_SHOWN = 20
IDLE_POLL_S = 0.05
MAX_YIELD_S = 5.0
FULL_DISK_S = 10.0
WINDOW_S = 24 * 3600
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
_ID = re.compile(r"batch_[0-9a-f]{24}")
Record = dict[str, Any]


class Batches:
    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files, self.threads = folder, files, files.threads
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, int] = {}  # of the batches that this process runs

    # ---- records ---------------------------------------------------------------------------

    def _path(self, batch_id: str, ending: str) -> Path:
        if not _ID.fullmatch(batch_id):
            raise NotFound(f"no batch {batch_id!r:.100}", "batch_id")
        return self._folder / f"{batch_id}.{ending}"

    def record(self, batch_id: str) -> Record:
        """The record of a batch, if the client may see it; NotFound. OSError if the disk fails."""
        found = read_record(self._path(batch_id, "json"))
        if found is None or not identity().may_see(found.get("owner", "")):
            raise NotFound(f"no batch {batch_id!r:.100}", "batch_id")
        return found

    def all(self) -> list[Record]:
        """The records that the client may see, newest first."""
        found = []
        for path in self._folder.glob("batch_*.json"):
            with suppress(NotFound):
                found.append(self.record(path.stem))
        return sorted(found, key=lambda r: (-r["created_at"], r["id"]))

    def _save(self, record: Record, **changes: Any) -> None:
        record |= changes
        make_private_folder(self._folder)
        write_json(self._path(record["id"], "json"), record)

    # ---- life ------------------------------------------------------------------------------

    def create(
        self,
        state: ServerState,
        file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None = None,
        num_lines: int = 0,
    ) -> Record:
        """Create and start a batch. ``num_lines``: of the file, where they are counted already."""
        try:
            self._files.record(file_id)
        except NotFound as error:
            raise NotFound(error.message, "input_file_id") from None
        now = int(time.time())
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
        record: Record = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_S,
            "request_counts": {"total": num_lines, "completed": 0, "failed": 0},
            "metadata": metadata,
            "owner": identity().owner,
        } | {f"{name}_at": None for name in (*times, "cancelling")}
        self._save(record)
        self._start(state, record)
        return record

    def resume(self, state: ServerState) -> int:
        """Continue the batches that were running when their process ended, if no other process does
        so; how many may be."""
        if not self._folder.is_dir():
            return 0
        try:
            known = self.all()
        except OSError as error:
            log.error("no batch is continued before the next start: %s", disk_fault(error) or error)
            return 0
        left = [r for r in known if r["status"] in RUNNING and r["id"] not in self._tasks]
        for record in left:
            self._start(state, record)
        return len(left)

    def _start(self, state: ServerState, record: Record) -> None:
        task = asyncio.create_task(self._run_to_end(state, record))
        self._tasks[record["id"]] = task

    def _claim(self, record: Record) -> bool:
        """Take a batch, and read its record again; False if another process has it, or it has
        ended. The system gives it free when this process dies."""
        batch_id = record["id"]
        if batch_id not in self._locks:
            lock = lock_file(self._path(batch_id, "lock"))
            if lock is None:
                return False
            self._locks[batch_id] = lock
            record |= self.record(batch_id)
        if record["status"] not in RUNNING:
            self._release(batch_id)
        return batch_id in self._locks

    def _release(self, batch_id: str) -> None:
        lock = self._locks.pop(batch_id, None)
        if lock is not None:
            with suppress(OSError):
                self._path(batch_id, "lock").unlink(missing_ok=True)
            os.close(lock)

    async def cancel(self, batch_id: str) -> Record:
        """Cancel a batch; its answers so far are stored. One of another process ends with the lines
        that it has begun."""
        record = self.record(batch_id)
        task = self._tasks.get(batch_id)
        if record["status"] not in RUNNING:
            raise InvalidRequest(f"the batch is {record['status']} already", "batch_id")
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        elif not self._claim(record):
            self._path(batch_id, "cancel").touch(FILE_MODE)
            return record | {"status": "cancelling", "cancelling_at": int(time.time())}
        record = self.record(batch_id)
        if record["status"] in RUNNING:
            self._finish(record, "cancelled")
        self._release(batch_id)
        return record

    def delete(self, batch_id: str) -> None:
        """Delete a batch that has ended, with its files; InvalidRequest if it runs."""
        record = self.record(batch_id)
        if record["status"] in RUNNING:
            raise InvalidRequest("the batch runs: cancel it first", "batch_id")
        self._path(batch_id, "json").unlink(missing_ok=True)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if record[name] is not None:
                self._files.delete(record[name])

    async def stop(self) -> None:
        """Stop all batches; the next process continues them."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run_to_end(self, state: ServerState, record: Record) -> None:
        forget_request_id()
        has_own_cache = state.config.serve.isolate_cache_by == "key"
        set_identity(Identity(record.get("owner", ""), is_admin=False, has_own_cache=has_own_cache))
        try:
            while not await self._run_unless_disk_fails(state, record):
                await asyncio.sleep(FULL_DISK_S)
        except Exception:
            log.exception("batch %s failed", record["id"])
        finally:
            self._tasks.pop(record["id"], None)
            self._release(record["id"])

    async def _run_unless_disk_fails(self, state: ServerState, record: Record) -> bool:
        """Run the batch, if no other process does; False if the disk was full or failed. Answers so
        far are stored."""
        try:
            if self._claim(record):
                await self._run_or_fail(state, record)
        except Exception as error:
            fault = disk_fault(error, "/v1/batches")
            if fault is None:
                raise
            log.error("batch %s waits: %s", record["id"], fault)
            return False
        return True

    async def _run_or_fail(self, state: ServerState, record: Record) -> None:
        try:
            await self._run(state, record)
        except Exception as error:
            if disk_fault(error):
                raise
            if isinstance(error, RequestError):
                told = {"code": "invalid_file", "message": str(error), "line": None, "param": None}
                self._save(record, errors={"object": "list", "data": [told]})
            else:
                log.exception("batch %s failed", record["id"])
            self._finish(record, "failed")

    async def _run(self, state: ServerState, record: Record) -> None:
        data = await run_in(self.threads, self._files.content, record["input_file_id"])
        lines, errors = await run_in(self.threads, check_lines, data, record["endpoint"])
        if errors:
            self._save(record, errors={"object": "list", "data": errors[:MAX_ERRORS_SHOWN]})
            self._finish(record, "failed")
            return
        done = self._answered(record)
        record["request_counts"]["total"] = len(lines)
        self._save(record, status="in_progress", in_progress_at=int(time.time()))
        left = [line for line in lines if line.custom_id not in done]
        feed = iter(left)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_AT_ONCE, len(left))):
                group.create_task(self._work(state, record, feed))
        counts = record["request_counts"]
        if self._is_cancelled(record):
            self._finish(record, "cancelled")
        elif counts["completed"] + counts["failed"] == len(lines):
            self._finish(record, "completed")

    async def _work(self, state: ServerState, record: Record, feed: Any) -> None:
        for line in feed:
            if self._is_cancelled(record):
                return
            await _yield_to_clients(state)
            begin_call(fair_share_key(), record["id"])  # the batch's lines take turns as one call
            answer = await answer_line(state, line)
            if not state.intake.is_accepting and answer["response"]["status_code"] == 503:
                return  # the next process answers this line
            is_good = answer["response"]["status_code"] < 400
            path = self._path(record["id"], "out" if is_good else "err")
            write_private(path, orjson.dumps(answer) + b"\n", is_appended=True)
            record["request_counts"]["completed" if is_good else "failed"] += 1
            self._save(record)

    def _is_cancelled(self, record: Record) -> bool:
        return self._path(record["id"], "cancel").exists()

    def _answered(self, record: Record) -> set[str]:
        """The ids that have an answer, and count them; an incomplete last line is dropped."""
        done: set[str] = set()
        for ending, name in (("out", "completed"), ("err", "failed")):
            path = self._path(record["id"], ending)
            data = read_unless_gone(path) or b""
            whole = [line for line in data.split(b"\n")[:-1] if line]
            if path.exists():
                os.truncate(path, data.rfind(b"\n") + 1)  # needs no room on the disk
            ids = {orjson.loads(line)["custom_id"] for line in whole}
            record["request_counts"][name] = len(ids)
            done |= ids
        return done

    def _finish(self, record: Record, status: str) -> None:
        for ending, name in (("out", "output_file_id"), ("err", "error_file_id")):
            path = self._path(record["id"], ending)
            if path.exists():
                label = f"{record['id']}_{'output' if ending == 'out' else 'error'}.jsonl"
                made = self._files.create(path.read_bytes(), label, "batch_output")
                record[name] = made["id"]
                path.unlink()
        self._save(record, **{"status": status, f"{status}_at": int(time.time())})
        self._path(record["id"], "cancel").unlink(missing_ok=True)


async def _yield_to_clients(state: ServerState) -> None:
    """Wait up to MAX_YIELD_S for the requests of clients in the queue."""
    until_s = time.monotonic() + MAX_YIELD_S
    while state.intake.load.num_waiting and time.monotonic() < until_s:
        await asyncio.sleep(IDLE_POLL_S)


def check_lines(data: bytes, endpoint: str | None) -> tuple[Sequence[Line], list[Record]]:
    """(requests of a file, errors of its lines)."""
    lines: list[Line] = []
    errors: list[Record] = []
    seen: set[str] = set()
    texts = [text for text in data.split(b"\n") if text.strip()]
    if not texts or len(texts) > MAX_LINES:
        return [], [_error(None, f"the file must hold 1 to {MAX_LINES} requests", None)]
    for number, text in enumerate(texts, 1):
        try:
            line = read_line(text)
            if endpoint is not None and line.url != endpoint:
                raise InvalidRequest(f"url must be the batch's endpoint {endpoint}", "url")
            if line.custom_id in seen:
                raise InvalidRequest(f"custom_id {line.custom_id!r:.80} occurs twice", "custom_id")
        except InvalidRequest as error:
            errors.append(_error(number, error.message, error.param))
            continue
        seen.add(line.custom_id)
        lines.append(line)
    return lines, errors


def _error(line: int | None, message: str, param: str | None) -> Record:
    return {"code": "invalid_line", "message": message, "line": line, "param": param}
