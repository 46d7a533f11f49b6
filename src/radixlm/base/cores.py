"""The processor cores of this process."""

import os


def num_cores() -> int:
    """Processor cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS has not
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
