"""Stacks of the threads of several processes, also of those that hang.

Each process has a file, to which a signal handler in C writes the stacks of its Python threads; it
needs neither the GIL nor the process's main loop. The process locks the file: only while the lock
is held is its pid its own, and only then may it be sent the signal.
"""

import contextlib
import faulthandler
import fcntl
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 18  # of the stacks of one process
WAIT_S = 2.0  # for all processes together
POLL_S = 0.05
_PREFIX = "stacks-"
_asking = threading.Lock()


def offer_stacks(folder: Path, role: str) -> None:
    """Let ``collect_stacks`` read this process's stacks in ``folder``; once a process. Not
    where there is no such folder (the server is on another machine), or where its disk fails."""
    if not folder.is_dir():
        return
    path = folder / f"{_PREFIX}{role}-{os.getpid()}"
    try:
        file = path.open("ab+", buffering=0)
    except OSError as error:
        log.warning("%s: no stacks of this process: %s", path, error.strerror)
        return
    faulthandler.register(signal.SIGRTMIN, file=file, all_threads=True)  # keeps the file open
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def collect_stacks(folders: Iterable[Path]) -> str:
    """The stacks of this process and of those that offer theirs in ``folders``."""
    with _asking:
        files = sorted(path for folder in folders for path in folder.glob(f"{_PREFIX}*"))
        asked = {path: size for path in files if (size := _ask(path)) is not None}
        ends = _wait(asked)
        parts = [f"== this process, pid {os.getpid()} ==\n{_own_stacks()}"]
        for path, start in asked.items():
            role, pid = path.name.removeprefix(_PREFIX).rsplit("-", 1)
            text = _read(path, start) if ends[path] > start else f"no answer within {WAIT_S:g} s\n"
            parts.append(f"== {role}, pid {pid} ==\n{text}")
    return "\n".join(parts)


def _own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file.fileno(), MAX_BYTES, 0).decode(errors="replace")


def _ask(path: Path) -> int | None:
    """Send the signal; the size of the file before. None for a process that has ended."""
    pid = int(path.name.rsplit("-", 1)[1])
    if pid == os.getpid():
        return None
    with contextlib.suppress(OSError), path.open("rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                file.truncate(0)
            size = os.fstat(file.fileno()).st_size
            os.kill(pid, signal.SIGRTMIN)
            return size
        path.unlink()
    return None


def _wait(asked: dict[Path, int]) -> dict[Path, int]:
    """The sizes of the files when all have grown and grow no more, or after WAIT_S."""
    end_s, sizes = time.monotonic() + WAIT_S, asked
    while asked:
        time.sleep(POLL_S)
        last, sizes = sizes, {path: _size(path) for path in asked}
        if (sizes == last and all(sizes[p] > asked[p] for p in asked)) or time.monotonic() > end_s:
            break
    return sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # its server ends
        return 0


def _read(path: Path, start: int) -> str:
    with path.open("rb") as file:
        return os.pread(file.fileno(), MAX_BYTES, start).decode(errors="replace")
