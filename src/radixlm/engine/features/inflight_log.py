"""InflightLog: which quarantined request is being computed right now, in a file that outlives the
process. If the engine dies again, the supervisor reads there which request to count it against.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item

log = logging.getLogger(__name__)

SIZE = 1024


class InflightLog(Feature):
    """Writes the id of a quarantined request before a step that computes it alone, and clears it
    after. Without a ``path``, or where it cannot be written, the log lives as long as the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._map = mmap.mmap(-1, SIZE) if path is None else _mapped(path)
        self._quarantined: set[str] = set()
        self.current: str | None = None  # the request that is computed alone
        self._write("")

    def arrive(self, request: Request) -> bool:
        if request.wire.is_quarantined:
            self._quarantined.add(request.rid)
        return request.wire.is_quarantined

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        if not self._quarantined and self.current is None:
            return {}
        alone = items[0].rid if len(items) == 1 and items[0].rid in self._quarantined else ""
        if alone or self.current is not None:
            self._write(alone)
        return {}

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        self._quarantined.discard(request.rid)

    def release(self, request: Request) -> None:
        self._quarantined.discard(request.rid)

    def _write(self, rid: str) -> None:
        data = rid.encode()[:SIZE]
        self._map[:] = data.ljust(SIZE, b"\0")
        self.current = rid or None


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            # its blocks, now: a write to a hole of the file would kill the process on a full disk
            file.write(bytes(SIZE))
            return mmap.mmap(file.fileno(), SIZE)
    except OSError as error:
        log.warning("%s: no log of quarantined requests: %s", path, error.strerror)
        return mmap.mmap(-1, SIZE)


def read_inflight_rid(path: Path) -> str | None:
    """The quarantined request that was being computed when the engine died."""
    try:
        return path.read_bytes().rstrip(b"\0").decode() or None
    except (OSError, UnicodeDecodeError):
        return None
