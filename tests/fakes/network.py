"""Tests that change this host's addresses, and those with a browser: Chromium ends its requests
with ERR_NETWORK_CHANGED when an address comes or goes."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path(tempfile.gettempdir(), "radixlm-tests-network.lock")


@contextmanager
def network(*, changes: bool) -> Iterator[None]:
    """No other test changes the host's addresses within the block; with ``changes`` none uses a
    browser either. Other processes are waited for."""
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if changes else fcntl.LOCK_SH)
        yield
