"""A pytest plug-in for processes that share one GPU (`-p tests.gpu.device_failures`, with xdist).

A kernel that reads outside its memory leaves the device unusable for its process, and every later
test there would fail. So the process exits after such a test, which is reported as its cause, and
xdist gives the remaining tests to a new process.
"""

from __future__ import annotations

import os
import sys

import pytest

EXIT = 3


def is_device_broken() -> bool:
    """Whether the device answers this process with errors."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Only in a worker, because without xdist no other process would go on."""
    if "PYTEST_XDIST_WORKER" in os.environ and is_device_broken():
        sys.stderr.flush()
        os._exit(EXIT)
