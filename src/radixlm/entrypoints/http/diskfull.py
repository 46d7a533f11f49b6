"""A disk without room is nobody's bug: an honest 507, and work that waits for room."""

from __future__ import annotations

import errno
import sqlite3

from radixlm.base.errors import RadixError

_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFull(RadixError):
    """507 Insufficient Storage."""

    status = 507
    code = "insufficient_storage"


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk has no room; of several errors at once, whether one says so."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_disk_full(inner) for inner in error.exceptions)
    if isinstance(error, sqlite3.Error):
        return "full" in str(error)
    return isinstance(error, OSError) and error.errno in _ERRNOS
