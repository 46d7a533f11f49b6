"""File operations of the segment tier, in one place that tests replace by disks with faults; and
which folders and files it trusts."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.base.private_files import FILE_MODE, make_private_folder


class Files:
    """The operating system's. OSError where a disk fails."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a regular file of ours; OSError for a symlink or somebody else's file."""
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1:
            return fd
        os.close(fd)
        raise OSError(f"{path.name} is not a regular file of this user with one name")

    def write(self, fd: int, data: bytes, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:] if done else data, offset + done)

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        return os.pread(fd, num_bytes, offset)

    def remove(self, path: Path) -> None:
        """Delete a file, and free its room even where a reader has it open."""
        with suppress(OSError):  # no descriptor is left: then when the reader closes it
            fd = self.open(path, os.O_WRONLY)
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
        path.unlink(missing_ok=True)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def free_bytes(self, folder: Path) -> int:
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize


def trusted_folder(folder: Path, flag: str, *, was_good: bool = False) -> Path:
    """``folder``, made if missing, with mode 0700; ConfigError if it is a symlink, another user's,
    or cannot be written. ``was_good``: it could be used before, so a disk that fails now is no
    mistake of the options."""
    works = "a folder of this user works"
    try:
        make_private_folder(folder)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ConfigError(f"{flag} {folder}: a symlink, or another user's; {works}")
        if not was_good and not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{flag} {folder}: it cannot be written; {works}")
    except OSError as error:
        if not was_good:
            raise ConfigError(f"{flag} {folder}: {error.strerror or error}; {works}") from error
    return folder
