"""What the server prepares while the engine process imports torch: it has the system read the
checkpoint into its page cache, and decides how much memory the engine prefaults for packed weights.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from radixlm.base.system_memory import system_memory
from radixlm.config.server_config import ServerConfig
from radixlm.engine.affinity import is_placed
from radixlm.engine.packed_key import find_packed
from radixlm.engine.startup import will_need

MAX_CACHE_SHARE = 0.5  # of available memory: more would evict what was read before it is used
MAX_PREFAULT_SHARE = 0.25
MAX_PREFAULT_BYTES = 2 << 30  # what can be prefaulted while torch is imported
# packed bytes per byte of a 16 bit checkpoint, without scales
PACKED_SHARES = {"int4": 0.25, "int8": 0.5, "fp8": 0.5}


def read_ahead(folder: Path, packed: Sequence[Path] = ()) -> threading.Thread | None:
    """Read all safetensors files of ``folder``, or its GGUF file, or ``packed`` files in their
    place, into the page cache in the background. Files that cannot be read are left to the loader,
    which reports them. None where the system cannot do this, or memory is short."""
    files, num_bytes = _sized(packed) if packed else _weights(folder)
    if not hasattr(os, "posix_fadvise") or not num_bytes:
        return None
    if num_bytes > MAX_CACHE_SHARE * system_memory().available:
        return None
    thread = threading.Thread(target=will_need, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def prefault_bytes(config: ServerConfig, folder: Path) -> int:
    """Bytes to prefault for the weights that a CPU packs, about what they will take. 0 where
    nothing is packed on the host, a packed file is there, or memory is short."""
    model = config.model
    if config.execute.device != "cpu" or model.load_format == "dummy":
        return 0
    kind = model.quantized_as
    share = next((PACKED_SHARES[name] for name in PACKED_SHARES if name in kind), 1.0)
    num_bytes = min(int(share * _weights(folder)[1]), MAX_PREFAULT_BYTES)
    max_bytes = MAX_PREFAULT_SHARE * system_memory().available
    if find_packed(config, folder):
        return 0
    if is_placed(config):  # before it is, memory would come from anywhere
        return 0
    return num_bytes if num_bytes * config.parallel.num_replicas < max_bytes else 0


def _weights(folder: Path) -> tuple[Sequence[Path], int]:
    """The weight files and their total size; none if one cannot be read."""
    return _sized(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf")))


def _sized(files: Sequence[Path]) -> tuple[Sequence[Path], int]:
    try:
        return files, sum(file.stat().st_size for file in files)
    except OSError:
        return [], 0
