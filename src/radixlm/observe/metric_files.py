"""Files in which processes count together: prometheus_client's, safe on a disk that is full."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 16
_ENTRY_BYTES = 64  # of an entry besides its key, at most


class OneFamilyEach(Collector):  # type: ignore[misc]
    """The families of several collectors; those of one name are joined, as a scrape may tell a name
    once."""

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()


class AllocatedDict(MmapedDict):  # type: ignore[misc]
    """Its file has all of its blocks before they are mapped: a write to a hole on a full disk is a
    SIGBUS. Without room it counts in memory, where other processes do not see it."""

    _f: BinaryIO

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        try:
            if not read_mode:
                _make(filename)
        except OSError as error:
            with suppress(OSError):  # an empty one would be no file of counts
                os.unlink(filename)
            with _in_memory(filename, error) as memory:
                super().__init__(f"/proc/self/fd/{memory.fileno()}")
        else:
            super().__init__(filename, read_mode)

    def _init_value(self, key: str) -> None:
        if self._used + len(key.encode()) + _ENTRY_BYTES > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
            except OSError as error:
                memory = _in_memory(self._fname, error)
                memory.write(self._m[:])
                memory.flush()
                self._f.close()
                self._f = memory
        super()._init_value(key)


def _make(filename: str) -> None:
    """A file of FIRST_BYTES, unless it is there; OSError without room."""
    descriptor = os.open(filename, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FIRST_BYTES)
    finally:
        os.close(descriptor)


def _in_memory(filename: str, error: OSError) -> BinaryIO:
    """A file in place of one that has no room."""
    why = error.strerror
    log.warning("%s: %s; other processes do not see what this one counts now", filename, why)
    return open(os.memfd_create("metrics", os.MFD_CLOEXEC), "a+b")


def install() -> None:
    """Count in such files from now on."""
    if hasattr(os, "posix_fallocate") and hasattr(os, "memfd_create"):
        values.MmapedDict = AllocatedDict
