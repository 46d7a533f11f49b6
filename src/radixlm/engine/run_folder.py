"""The folder of a server's sockets: locked while the server lives, removed by the next one if not.

A server that is killed cannot remove its folder. The kernel releases its lock, so that a later
server can tell the folder from that of a live one.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from radixlm.base.private_files import LOCK_FILE, make_locked_folder

PREFIX = "radixlm-"
IPC = "ipc://"


class RunFolder:
    """A new folder (mode 0700) below the system's temporary one."""

    def __init__(self) -> None:
        self.path, self._lock = make_locked_folder(PREFIX)
        self._held: dict[str, int] = {}

    def hold(self, addresses: Iterable[str]) -> None:
        """Remember the sockets of these addresses, as far as they exist by now (Linux only). If a
        cleaner of temporary files has deleted the folder, make it again: processes that are
        replaced write to it."""
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700)
        if not hasattr(os, "O_PATH"):
            return
        for address in addresses:
            with contextlib.suppress(OSError):
                fresh = os.open(address.removeprefix(IPC), os.O_PATH | os.O_NOFOLLOW)
                self._let_go(address)  # its process may have been replaced
                self._held[address] = fresh

    def reachable(self, address: str) -> str:
        """An address at which others reach the same socket, also where a cleaner has deleted it and
        another user has made the folder again."""
        is_there = self._is_own() and Path(address.removeprefix(IPC)).exists()
        if address not in self._held or is_there:
            return address
        return f"{IPC}/proc/{os.getpid()}/fd/{self._held[address]}"

    def _is_own(self) -> bool:
        with contextlib.suppress(OSError):
            return os.lstat(self.path).st_uid == os.geteuid()
        return False

    def _let_go(self, address: str) -> None:
        if (held := self._held.pop(address, None)) is not None:
            os.close(held)

    def remove(self) -> None:
        """Delete the folder; calling it twice is fine."""
        for address in list(self._held):
            self._let_go(address)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def remove_stale() -> list[Path]:
    """Delete the folders of this user's servers that have ended, also those of tensors and adapters
    that came in requests (weight_updates/tensor_spool.py, lora/registry.py); which ones."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and _is_free(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _is_free(folder: Path) -> bool:
    """Whether no process holds the folder's lock; OSError for a folder that has none."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
