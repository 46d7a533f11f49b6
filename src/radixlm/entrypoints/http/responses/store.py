"""Where responses are kept, so that later ones may go on from them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from radixlm.base.errors import ConfigError

MAX_IN_MEMORY = 4096


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the items of its input, and the conversation up to its end."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class ResponseStore(Protocol):
    """Keeps responses by id; the last ``put`` of an id wins."""

    def put(self, stored: Stored) -> None: ...

    def get(self, response_id: str) -> Stored | None: ...

    def delete(self, response_id: str) -> bool: ...


class MemoryStore:
    """The newest responses, until the process ends."""

    def __init__(self, capacity: int = MAX_IN_MEMORY) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        self._kept[stored.response["id"]] = stored
        self._kept.move_to_end(stored.response["id"])
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def get(self, response_id: str) -> Stored | None:
        return self._kept.get(response_id)

    def delete(self, response_id: str) -> bool:
        return self._kept.pop(response_id, None) is not None


class SqliteStore:
    """Responses in a file, which outlive the process."""

    def __init__(self, path: Path) -> None:
        """ConfigError if the file cannot be had."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(id TEXT PRIMARY KEY, made REAL, response BLOB, items BLOB, messages BLOB)"
            )
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--file-storage-path {path.parent}: {error}") from error
        self._lock = threading.Lock()

    def put(self, stored: Stored) -> None:
        parts = (stored.response, stored.input_items, stored.messages)
        blobs = [orjson.dumps(part) for part in parts]
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)",
                (stored.response["id"], time.time(), *blobs),
            )
            self._db.commit()

    def get(self, response_id: str) -> Stored | None:
        with self._lock:
            row = self._db.execute(
                "SELECT response, items, messages FROM responses WHERE id = ?", (response_id,)
            ).fetchone()
        return Stored(*(orjson.loads(blob) for blob in row)) if row else None

    def delete(self, response_id: str) -> bool:
        with self._lock:
            found = self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            self._db.commit()
        return found.rowcount > 0
