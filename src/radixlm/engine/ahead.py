"""Have the system read a checkpoint from disk while the engine process still imports torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

MOST_OF_MEMORY = 0.5  # reading more ahead would push out what was read before it is used


def read_ahead(folder: Path) -> threading.Thread | None:
    """Ask for all safetensors files of ``folder``, else for its GGUF file, in the background; what
    cannot be had is left to the loader, which says what is wrong. None where the system cannot, or
    memory is short."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    if not hasattr(os, "posix_fadvise") or not files:
        return None
    try:
        num_bytes = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    if num_bytes > MOST_OF_MEMORY * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_ask, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _ask(files: list[Path]) -> None:
    for file in files:
        try:
            opened = os.open(file, os.O_RDONLY)
        except OSError:
            return
        try:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(opened)
