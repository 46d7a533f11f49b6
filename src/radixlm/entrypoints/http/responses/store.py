"""Stores of responses, which later responses continue."""

import os
import secrets
import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from radixlm.base.errors import ConfigError, Overloaded
from radixlm.base.lazy import require
from radixlm.base.private_files import lock_file, make_private_folder, write_private

MAX_IN_MEMORY = 4096
MAX_BYTES = 256 << 20
KEEP_S = 30 * 24 * 3600  # as OpenAI does
REDIS_TIMEOUT_S = 5.0
_PREFIX = "radixlm:response:"


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the items of its input, the conversation up to its end, and whose it is; or a
    conversation and its items."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    owner: str = ""

    @property
    def is_unfinished(self) -> bool:
        return self.response.get("status") in ("queued", "in_progress")


class ResponseStore(Protocol):
    """Keeps responses by id; the last ``put`` of an id wins. May be called from threads."""

    def put(self, stored: Stored) -> None: ...

    def get(self, response_id: str) -> Stored | None: ...

    def delete(self, response_id: str) -> bool: ...

    def unfinished(self) -> list[Stored]:
        """The responses of processes that ended before these were finished."""


class MemoryStore:
    """The newest responses, until the process ends: at most ``capacity`` of them in at most
    ``max_bytes``. They are kept as JSON, whose size is known."""

    def __init__(self, capacity: int = MAX_IN_MEMORY, max_bytes: int = MAX_BYTES) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._responses: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def put(self, stored: Stored) -> None:
        response_id = stored.response["id"]
        self.delete(response_id)
        parts = (stored.response, stored.input_items, stored.messages, stored.owner)
        data = orjson.dumps(parts)
        self._responses[response_id] = data
        self.num_bytes += len(data)
        while len(self._responses) > self._capacity or self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, response_id: str) -> Stored | None:
        data = self._responses.get(response_id)
        return Stored(*orjson.loads(data)) if data is not None else None

    def delete(self, response_id: str) -> bool:
        data = self._responses.pop(response_id, None)
        self.num_bytes -= len(data or b"")
        return data is not None

    def unfinished(self) -> list[Stored]:
        return []


class SqliteStore:
    """Responses in a file, of any number of processes; opening it deletes those that are too old.
    Each process keeps the lock of a file of its own, so that the others know whether it lives."""

    def __init__(self, path: Path) -> None:
        """ConfigError if the file cannot be opened."""
        try:
            if not path.parent.is_dir():
                make_private_folder(path.parent)
            write_private(path, b"", is_appended=True)  # SQLite's other files get the same mode
            self._folder, self._process = path.parent, secrets.token_hex(8)
            self._process_lock = lock_file(self._lock_path(self._process))
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("BEGIN IMMEDIATE")  # others may open it at the same time
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(id TEXT PRIMARY KEY, made REAL, response BLOB, items BLOB, messages BLOB, "
                "owner TEXT NOT NULL DEFAULT '')"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS unfinished "
                "(id TEXT PRIMARY KEY, process TEXT NOT NULL DEFAULT '')"
            )
            for table, name in (("responses", "owner"), ("unfinished", "process")):
                columns = self._db.execute(f"PRAGMA table_info({table})")
                if name not in [row[1] for row in columns]:  # of an earlier version
                    column = f"{name} TEXT NOT NULL DEFAULT ''"
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
            self._db.execute("DELETE FROM responses WHERE made < ?", (time.time() - KEEP_S,))
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--file-storage-path {path.parent}: {error}") from error
        self._lock = threading.Lock()

    def _lock_path(self, process: str) -> Path:
        return self._folder / f"process-{process}.lock"

    def _has_ended(self, process: str) -> bool:
        path = self._lock_path(process)
        if not path.exists():
            return True
        lock = lock_file(path)
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)
        return lock is not None

    def close(self) -> None:
        self._db.close()
        if self._process_lock is not None:
            os.close(self._process_lock)

    def put(self, stored: Stored) -> None:
        response_id = stored.response["id"]
        parts = (stored.response, stored.input_items, stored.messages)
        blobs = [orjson.dumps(part) for part in parts]
        statement, named = "DELETE FROM unfinished WHERE id = ?", [response_id]
        if stored.is_unfinished:
            statement = "INSERT OR REPLACE INTO unfinished VALUES (?, ?)"
            named = [response_id, self._process]
        with self._lock, self._db:  # rolled back where the disk fails
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                (response_id, time.time(), *blobs, stored.owner),
            )
            self._db.execute(statement, named)

    def get(self, response_id: str) -> Stored | None:
        with self._lock:
            row = self._db.execute(
                "SELECT response, items, messages, owner FROM responses WHERE id = ?",
                (response_id,),
            ).fetchone()
        if row is None:
            return None
        response, items, messages = (orjson.loads(blob) for blob in row[:3])
        return Stored(response, items, messages, row[3])

    def delete(self, response_id: str) -> bool:
        with self._lock, self._db:
            deleted = self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            self._db.execute("DELETE FROM unfinished WHERE id = ?", (response_id,))
        return deleted.rowcount > 0

    def unfinished(self) -> list[Stored]:
        with self._lock:
            rows = self._db.execute("SELECT id, process FROM unfinished").fetchall()
        files = {path.stem.removeprefix("process-") for path in self._folder.glob("process-*.lock")}
        processes = files | {process for _, process in rows} - {self._process}
        gone = {process for process in processes if self._has_ended(process)}
        ids = [response_id for response_id, process in rows if process in gone]
        return [stored for i in ids if (stored := self.get(i)) is not None]


class RedisStore:
    """Responses in Redis, for several servers; each expires after 30 days."""

    def __init__(self, url: str, client: Any = None) -> None:
        """ConfigError if nobody answers at ``url``. ``client``: one that is made already."""
        redis = require("redis", "redis", "--response-store")
        self._failure = redis.RedisError
        try:
            self._db = client or redis.Redis.from_url(
                url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
            )
            self._db.ping()
        except (redis.RedisError, ValueError, OSError) as error:
            raise ConfigError(f"--response-store: {error}") from error

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._db, verb)(*args, **options)
        except self._failure as error:
            raise Overloaded(f"the store of responses does not answer: {error}") from error

    def put(self, stored: Stored) -> None:
        parts = (stored.response, stored.input_items, stored.messages, stored.owner)
        self._ask("set", _PREFIX + stored.response["id"], orjson.dumps(parts), ex=KEEP_S)

    def get(self, response_id: str) -> Stored | None:
        found = self._ask("get", _PREFIX + response_id)
        return Stored(*orjson.loads(found)) if found else None

    def delete(self, response_id: str) -> bool:
        return bool(self._ask("delete", _PREFIX + response_id))

    def unfinished(self) -> list[Stored]:
        """None: the responses of other servers cannot be told apart."""
        return []


def store_of(
    option: str | None, folder: Path, is_persistent: bool, max_bytes: int = MAX_BYTES
) -> ResponseStore:
    """The store of --response-store. Unset: a file in ``folder`` if ``is_persistent`` (the operator
    chose the folder, or several processes share it), else memory of at most ``max_bytes``.
    ConfigError."""
    if option is None:
        option = "sqlite" if is_persistent else "memory"
    if option == "memory":
        return MemoryStore(max_bytes=max_bytes)
    if option == "sqlite":
        return SqliteStore(folder / "responses.sqlite")
    if option.startswith(("redis://", "rediss://", "unix://")):
        return RedisStore(option)
    raise ConfigError(
        f"--response-store {option!r}: must be memory, sqlite or redis://host:port/number"
    )
