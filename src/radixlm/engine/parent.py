"""An engine process does not outlive its server, whatever ends that one and however early."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def check_parent(parent: int) -> None:
    """Leave if it was gone before the kernel was asked."""
    if os.getppid() != parent:
        os._exit(1)
