"""The flight record: which suspect request is being computed right now, in a file that outlives
the process. If the engine dies again, the supervisor reads there whom to blame."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.step.plan import Item

SIZE = 1024


class FlightRecord(Feature):
    """Writes the rid of a suspect before its step, and clears it after."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, SIZE)
        self._map = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        self._suspects: set[str] = set()
        self._is_written = False
        self._write("")

    def arrive(self, request: Request) -> None:
        if request.wire.is_suspect:
            self._suspects.add(request.rid)

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        if not self._suspects and not self._is_written:
            return {}
        alone = items[0].rid if len(items) == 1 and items[0].rid in self._suspects else ""
        if alone or self._is_written:
            self._write(alone)
        return {}

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        self._suspects.discard(request.rid)

    def release(self, request: Request) -> None:
        self._suspects.discard(request.rid)

    def _write(self, rid: str) -> None:
        data = rid.encode()[:SIZE]
        self._map[:] = data.ljust(SIZE, b"\0")
        self._is_written = bool(rid)


def blamed(path: Path) -> str | None:
    """The suspect that was being computed when the engine died."""
    try:
        return path.read_bytes().rstrip(b"\0").decode() or None
    except (OSError, UnicodeDecodeError):
        return None
