"""A file with a worker a line, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.router.discovery.source import Fields, Source
from radixlm.router.options import url_problem

log = logging.getLogger(__name__)

SETTLE_S = 0.2  # a file that changes meanwhile is not whole
Stamp = tuple[int, int, int]
"""When a file was changed, its size and its number; zeros where there is none."""
_NUMBERS = {"bootstrap_port": int, "priority": int, "cost": float}
_TEXTS = ("model_id", "worker_type", "api_key")


class WorkerFile:
    """Lines: "http://host:port", then any of worker_type=prefill, bootstrap_port=8998, model_id=M,
    priority=60, cost=2.0, api_key=K. What follows a # is a comment."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._source = path, source
        self._stamp: Stamp | None = None

    def read(self) -> None:
        """Read it for the first time; ConfigError: it cannot be read, or a line is wrong."""
        try:
            self._take(self._now())
        except OSError as error:
            raise ConfigError(f"--discovery-file {self._path}: {error.strerror}") from error

    async def look(self) -> None:
        """Read it if it has changed, but not while it is being written. What is wrong is logged
        once; the workers stay."""
        try:
            stamp = self._now()
            if stamp != self._stamp:
                await asyncio.sleep(SETTLE_S)
                if stamp == self._now():
                    self._take(stamp)
        except (OSError, ConfigError) as error:
            log.error("%s", error)

    def _now(self) -> Stamp:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return 0, 0, 0
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _take(self, stamp: Stamp) -> None:
        self._stamp = stamp
        text = self._path.read_text(encoding="utf-8", errors="replace")
        self._source.sync(workers_of(text, str(self._path)))


def workers_of(text: str, where: str) -> dict[str, Fields]:
    """The workers of a file's text by url; ConfigError names the line."""
    found: dict[str, Fields] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        here = f"--discovery-file {where}, line {number}"
        if problem := url_problem(words[0]):
            raise ConfigError(f"{here}: {problem}")
        found[words[0].rstrip("/")] = dict(_field(word, here) for word in words[1:])
    return found


def _field(word: str, here: str) -> tuple[str, object]:
    name, _, value = word.partition("=")
    if name in _TEXTS and value:
        return name, value
    try:
        return name, _NUMBERS[name](value)
    except (KeyError, ValueError):
        raise ConfigError(f"{here}: {word!r} is no field; worker_type=prefill works") from None
