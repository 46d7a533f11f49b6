"""RestartReserve: descriptors and memory that are held while an engine runs and freed to start the
next one, so that clients who use up the rest cannot prevent a restart.
"""

import contextlib
import mmap
import os

# two pipes of two ends, the file of quarantined requests, what the loader of the config opens
NUM_DESCRIPTORS = 8
# address space: the stack of the thread that waits for the process (8 MiB), and the child's start
NUM_BYTES = 16 << 20


class RestartReserve:
    """Descriptors of the null device and untouched memory; ``fill`` takes what there is of them."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._memory: mmap.mmap | None = None

    def fill(self) -> None:
        """Hold the reserve again. What cannot be had now is left to the next call."""
        with contextlib.suppress(OSError):
            if self._memory is None:
                self._memory = mmap.mmap(-1, NUM_BYTES)
        with contextlib.suppress(OSError):
            while len(self._descriptors) < NUM_DESCRIPTORS:
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        """Free the reserve for whoever asks next: do so without an ``await`` in between."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._memory is not None:
            self._memory.close()
            self._memory = None
