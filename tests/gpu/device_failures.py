"""A pytest plug-in for processes that share one GPU (``-p tests.gpu.device_failures``, with xdist).

A kernel that reads where it must not leaves the device unusable for its process: every later test
there would fail. So the process ends behind such a test, which is named as the one that ended it,
and xdist gives what is left to a new one.
"""

from __future__ import annotations

import os
import sys

import pytest

EXIT = 3


def is_ill() -> bool:
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
    """In a worker only: without xdist nobody would go on."""
    if "PYTEST_XDIST_WORKER" in os.environ and is_ill():
        sys.stderr.flush()
        os._exit(EXIT)
