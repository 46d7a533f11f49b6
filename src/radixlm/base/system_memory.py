"""The memory of this machine: psutil's figures, or the kernel's where /proc/meminfo is hidden."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil


class SystemMemory(NamedTuple):
    """Bytes. ``available``: that programs can have without others being swapped out."""

    total: int
    available: int


def system_memory() -> SystemMemory:
    """What there is now. A sandbox may hide /proc/meminfo: then ``available`` is what is free
    without the page cache, sysinfo(2)."""
    try:
        found = psutil.virtual_memory()
    except (OSError, KeyError, ValueError):
        size = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        return SystemMemory(total * size, free * size)
    return SystemMemory(found.total, found.available)
