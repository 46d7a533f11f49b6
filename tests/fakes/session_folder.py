"""A folder that the processes of a test session share: pytest's workers, and what tests start."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "RADIXLM_TEST_SESSION"


def session_folder() -> Path:
    """Outside a session, a folder of this process."""
    if begin_session():
        atexit.register(end_session)
    return Path(os.environ[_VARIABLE])


def begin_session() -> bool:
    """Make the folder, unless this process belongs to a session that has one; whether it did."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="radixlm-tests-")
    return True


def end_session() -> None:
    """Remove it."""
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)
