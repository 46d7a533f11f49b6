"""The C heap, which keeps freed memory for later."""

import ctypes
import sys


def trim_heap() -> None:
    """Return freed memory of the C heap to the system (``malloc_trim(3)``), on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
