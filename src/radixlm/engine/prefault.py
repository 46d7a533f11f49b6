"""What is done for a load while the engine process still imports torch: the system reads the
checkpoint from disk and makes pages of memory for the packed weights."""

import os
import threading
from pathlib import Path

import psutil

from radixlm.config.server_config import ServerConfig

MOST_OF_MEMORY = 0.5  # reading more ahead would push out what was read before it is used
MOST_OF_PAGES = 0.25
MOST_BYTES = 2 << 30  # pages that are made while torch is imported
# of a 16 bit checkpoint that is packed in so many bits, with a little left out
SHARES = {"int4": 0.25, "int8": 0.45, "fp8": 0.45}


def read_ahead(folder: Path) -> threading.Thread | None:
    """Ask for all safetensors files of ``folder``, else for its GGUF file, in the background; what
    cannot be had is left to the loader, which says what is wrong. None where the system cannot, or
    memory is short."""
    files, num_bytes = _weights(folder)
    if not hasattr(os, "posix_fadvise") or not num_bytes:
        return None
    if num_bytes > MOST_OF_MEMORY * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_ask, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def prefault_bytes(config: ServerConfig, folder: Path) -> int:
    """Memory worth making ready for weights that a CPU packs: not quite what they will take. 0
    where nothing is packed on the host, or memory is short."""
    model = config.model
    if config.execute.device != "cpu" or model.load_format == "dummy":
        return 0
    kind = model.quantization or model.torchao_config or ""
    share = next((SHARES[name] for name in SHARES if name in kind), 0.9)
    num_bytes = min(int(share * _weights(folder)[1]), MOST_BYTES)
    most = MOST_OF_PAGES * psutil.virtual_memory().available
    return num_bytes if num_bytes * config.parallel.dp_size < most else 0


def _weights(folder: Path) -> tuple[list[Path], int]:
    """The files that hold weights, and their bytes; none where one cannot be had."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    try:
        return files, sum(file.stat().st_size for file in files)
    except OSError:
        return [], 0


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
