"""Folders and files that only the server's user may read, whatever the umask."""

import fcntl
import os
import tempfile
from pathlib import Path

from radixlm.base.errors import ConfigError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
LOCK_FILE = "lock"


def make_private_folder(folder: Path) -> None:
    """Make ``folder`` and its missing parents with mode 0700; one that exists gets that mode."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(FOLDER_MODE, exist_ok=True)
    if folder.stat().st_mode & 0o7777 != FOLDER_MODE:  # a disk may be read-only
        folder.chmod(FOLDER_MODE)


def make_locked_folder(prefix: str) -> tuple[Path, int]:
    """A new folder of mode 0700 below the system's temporary one, and the descriptor of its lock,
    which the kernel releases with the process: so one that was left can be told from others."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fresh = folder / "new"  # gets its name once it is locked
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT, FILE_MODE)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(folder / LOCK_FILE)
    return folder, lock


def try_lock(fd: int) -> bool:
    """Whether this process now is the only one with the file's lock, until it closes ``fd`` or
    dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path) -> int | None:
    """The descriptor of a file, made if it is missing, with its lock; None if another process has
    the lock. Whoever has it may delete the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, FILE_MODE)
    if try_lock(fd) and os.fstat(fd).st_nlink:
        return fd
    os.close(fd)
    return None


def write_private(path: Path, data: bytes, *, is_appended: bool = False) -> None:
    """Write, or append to, a file of mode 0600."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    flags |= os.O_APPEND if is_appended else os.O_TRUNC
    with open(os.open(path, flags, FILE_MODE), "wb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(data)


def close_to_others(folder: Path) -> None:
    """Give a folder that exists, and the files in it, the modes 0700 and 0600."""
    if folder.is_dir():
        folder.chmod(FOLDER_MODE)
        for path in folder.iterdir():
            if path.is_file() and not path.is_symlink():
                path.chmod(FILE_MODE)


def read_secret(path: str | Path) -> bytes:
    """The contents of a file, without a line's end. ConfigError if it is absent, empty, or if
    others than its owner may read it. A file of root may be read by a group, as secrets of
    Kubernetes are by a pod's fsGroup."""
    try:
        with open(path, "rb") as file:
            facts, secret = os.fstat(file.fileno()), file.read().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {path}: {error}") from error
    closed = 0o037 if facts.st_uid == 0 != os.geteuid() else 0o077
    if facts.st_mode & closed or not secret:
        problem = "is empty" if not secret else "may be read by others: chmod 600"
        raise ConfigError(f"the file of a secret {path} {problem}")
    return secret
