"""FileStore: a file for each object in a folder, which other servers may share."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec

from radixlm.base import env
from radixlm.base.errors import ConfigError, TransferError
from radixlm.tiers.stores.base import FLAG, Positive, StoreOptions

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # nor wait at a FIFO
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STALE_S: Final = 3600.0
_MAX_OPEN: Final = 64  # files at a time
_GB: Final = 1 << 30


class FileOptions(StoreOptions, frozen=True):
    """``directory``: $SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR unless given. ``max_gb``: of all
    files in it; beyond that those unused for longest go, down to ``eviction_ratio`` of it.
    ``min_free_gb``: of the disk; nothing is written below."""

    directory: str = ""
    max_gb: Positive = 64
    eviction_ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    min_free_gb: Annotated[float, msgspec.Meta(ge=0)] = 1


class FileStore:
    """Files appear by a rename, whole or not at all. Links, other users' files and folders that
    others can write to are refused."""

    Options: ClassVar[type[StoreOptions]] = FileOptions
    medium: ClassVar[str] = "DISK"

    def __init__(self, options: FileOptions, namespace: str) -> None:
        folder = options.directory or env.HICACHE_FILE_DIR.get()
        if not folder:
            raise ConfigError(
                f"{FLAG}: the shared folder is missing; give "
                '{"directory": "/path"} or set SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR'
            )
        self._root, self._namespace = Path(folder).expanduser(), namespace
        self._options, self._folder = options, -1
        self._numbers, self._lock = count(), threading.Lock()
        self._used, self._counts = 0, {"evicted": 0.0, "refused": 0.0, "full": 0.0}

    def open(self) -> None:
        self._open_folder()

    def _open_folder(self) -> None:
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        root = os.open(self._root, _FOLDER)
        try:
            self._check(root, str(self._root))
            with suppress(FileExistsError):
                os.mkdir(self._namespace, 0o700, dir_fd=root)
            folder = os.open(self._namespace, _FOLDER, dir_fd=root)
        finally:
            os.close(root)
        try:
            self._check(folder, self._namespace)
        except TransferError:
            os.close(folder)
            raise
        if self._folder < 0:
            self._folder = folder
        else:  # other threads use it: the number stays
            os.dup2(folder, self._folder, inheritable=False)
            os.close(folder)
        self._used = sum(size for _, size, _, _ in self._files())

    def _follow_folder(self) -> None:
        """Open the folder again if it was deleted or replaced."""
        with self._lock:
            with suppress(FileNotFoundError):
                now = os.stat(self._root / self._namespace, follow_symlinks=False)
                if os.path.samestat(now, os.fstat(self._folder)):
                    return
            self._open_folder()

    @staticmethod
    def _check(folder: int, name: str) -> None:
        info = os.fstat(folder)
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise TransferError(
                f"{name} must belong to the server's user and be writable by no other: chmod 700"
            )

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._follow_folder()
        return [self._exists(name) for name in names]

    def _exists(self, name: str) -> bool:
        try:
            info = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        lengths: list[int] = []
        for first in range(0, len(names), _MAX_OPEN):
            part = slice(first, first + _MAX_OPEN)
            lengths += self._get(names[part], buffers[part])
        return lengths

    def _get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        with ExitStack() as stack:
            opened: list[tuple[int, int]] = []
            for name, buffer in zip(names, buffers, strict=True):
                opened.append(self._open(name, len(buffer)))
                if opened[-1][0] >= 0:
                    stack.callback(os.close, opened[-1][0])
            self._read([(fd, b[:n]) for (fd, n), b in zip(opened, buffers, strict=True) if fd >= 0])
            for fd, _ in opened:
                if fd >= 0:
                    with suppress(OSError):
                        os.utime(fd)  # used last now
        return [size for _, size in opened]

    def _open(self, name: str, limit: int) -> tuple[int, int]:
        """(descriptor, bytes) of a file; -1 for both if it is absent, foreign or too large."""
        try:
            fd = os.open(name, _READ, dir_fd=self._folder)
        except FileNotFoundError:
            return -1, -1
        except OSError as error:
            if self._exists(name):
                raise
            self._counts["refused"] += 1
            del error  # a link, a socket
            return -1, -1
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_size <= limit:
            return fd, info.st_size
        self._counts["refused"] += 1
        os.close(fd)
        return -1, -1

    def _read(self, files: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from the start of its file; of one that has become shorter, the rest of
        the buffer stays: its digest will not do."""
        for fd, buffer in files:
            done = 0
            while done < len(buffer) and (step := os.preadv(fd, [buffer[done:]], done)):
                done += step

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        self._follow_folder()
        disk = os.fstatvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize - self._options.min_free_gb * _GB
        for name, value in zip(names, values, strict=True):
            if len(value) > free:
                self._counts["full"] += 1
            elif not self._exists(name):
                self._put(name, value)
                free -= len(value)
                self._used += len(value)
        if self._used > self._options.max_gb * _GB:
            self._shrink(int(self._options.max_gb * self._options.eviction_ratio * _GB))

    def _put(self, name: str, value: bytes) -> None:
        temporary = f".{os.getpid()}-{time.time_ns()}-{next(self._numbers)}.tmp"
        fd = os.open(temporary, _WRITE, 0o600, dir_fd=self._folder)
        try:
            try:
                self._write(fd, value)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._folder)
            raise

    def _write(self, fd: int, value: bytes) -> None:
        view = memoryview(value)
        while view:
            view = view[os.write(fd, view) :]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def clear(self) -> None:
        self.delete([name for name in os.listdir(self._folder) if not name.endswith(".tmp")])
        self._used = sum(size for _, size, _, _ in self._files())

    def stats(self) -> dict[str, float]:
        return self._counts | {"used_bytes": float(self._used)}

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _files(self) -> Iterator[tuple[float, int, Path, bool]]:
        """(last used, bytes, path, whether its writer is gone) of all files of all namespaces."""
        for folder in os.scandir(self._root):
            if not folder.name.startswith("radixlm") or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                with suppress(FileNotFoundError):  # another server's
                    info = file.stat(follow_symlinks=False)
                    is_stale = file.name.endswith(".tmp") and info.st_mtime < time.time() - _STALE_S
                    yield info.st_mtime, info.st_size, Path(file.path), is_stale

    def _shrink(self, limit: int) -> None:
        """Delete what was unused for longest until at most ``limit`` bytes are left."""
        with self._lock:
            files = sorted(self._files())
            used = sum(size for _, size, _, _ in files)
            for _, size, path, is_stale in files:
                if used <= limit and not is_stale:
                    continue
                with suppress(FileNotFoundError):
                    path.unlink()
                    self._counts["evicted"] += 1
                used -= size
            self._used = used
