"""Disks with faults, and pages to store on them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np

from radixlm.tiers.base import PageRecord
from radixlm.tiers.files import Files
from radixlm.tiers.keys import page_keys

PAGE = 4
TOKENS = np.arange(PAGE, dtype=np.int32)


def payload(number: int, nbytes: int = 2048) -> np.ndarray:
    """bf16 numbers that compress, different for each ``number``."""
    values = np.random.default_rng(number).standard_normal(nbytes // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).copy()


def chain(count: int, seed: bytes = b"") -> list[bytes]:
    return page_keys(np.arange(count * PAGE, dtype=np.int32), PAGE, seed)


def records(keys: list[bytes], nbytes: int = 2048) -> list[PageRecord]:
    parents = [bytes(32), *keys]
    return [PageRecord(key, parents[i], TOKENS, payload(i, nbytes)) for i, key in enumerate(keys)]


class CrashingFiles(Files):
    """Writes ``limit`` bytes; the one that would exceed it is torn, and the disk is gone then."""

    def __init__(self, limit: int, error: int = errno.EIO) -> None:
        self.left, self._error = limit, error

    def write(self, fd: int, data: bytes, offset: int) -> None:
        part = data[: max(0, self.left)]
        self.left -= len(data)
        if part:
            super().write(fd, part, offset)
        if self.left < 0:
            raise OSError(self._error, "the disk is gone")


class ReadOnlyFiles(Files):
    """A disk that was mounted read-only, until ``is_writable``."""

    is_writable = False

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and not self.is_writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super().open(path, flags)


class StuckFiles(Files):
    """Reads wait until ``go`` is set, at most 30 s; the first ``free_reads`` do not."""

    def __init__(self) -> None:
        self.go, self.stick = threading.Event(), False

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        if self.stick:
            self.go.wait(30)
        return super().read(fd, num_bytes, offset)


class FullFiles(Files):
    """Reports ``free`` bytes; writes nothing where that is less than 0, and reads nothing with
    ``read_error``."""

    free, read_error = 1 << 40, 0

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.free < 0:
            raise OSError(errno.ENOSPC, "the disk is full")
        super().write(fd, data, offset)

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        if self.read_error:
            raise OSError(self.read_error, "the disk does not read")
        return super().read(fd, num_bytes, offset)

    def free_bytes(self, folder: Path) -> int:
        return self.free
