"""What names the files of the packed cache, known without torch: the server finds them while the
engine still imports it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import msgspec

import radixlm
from radixlm.base.record import Record
from radixlm.config.server_config import ServerConfig, flat

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".npy", ".remote")
_WEIGHT_CONFIGS = ("config.json", "quantize_config.json", "hf_quant_config.json", ".index.json")
_PACKING_CODE = ("arch", "kernels", "layers", "models", "quant", "weights")
# options of these groups that do not change what is packed
_NEUTRAL = {
    "dist_init_addr", "nccl_port", "node_rank", "cluster_secret_file", "base_gpu_id", "model_path",
    "tokenizer_path", "skip_tokenizer_init", "weight_version", "packed_cache_dir",
    "packed_cache_gb",
}  # fmt: skip


class Stamp(Record):
    """A file of a checkpoint as the system knows it. ``changed_ns``: of the inode, which each
    write moves, whatever time the file is given."""

    name: str
    num_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int


def checkpoint_key(config: ServerConfig, folder: Path, stamps: Sequence[Stamp]) -> str:
    """What a checkpoint and the options say of the packed weights: names and sizes of its files,
    its description, options, and the code that packs."""
    options = flat(config, show_secrets=False)
    names = {field.name for group in (config.parallel, config.model) for field in fields(group)}
    names = (names | {"kernel", "device"}) - _NEUTRAL
    return digest_of(
        radixlm.__version__, code_digest(), [(one.name, one.num_bytes) for one in stamps],
        (folder / "config.json").read_bytes(), {name: options.get(name) for name in sorted(names)},
        config.memory.disable_hybrid_swa_memory, config.speculate.speculative_algorithm,
    )  # fmt: skip


def digest_of(*facts: object) -> str:
    """SHA-256, the first 24 hex digits."""
    data = msgspec.msgpack.encode(facts, enc_hook=str, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:24]


def find_packed(config: ServerConfig, folder: Path) -> list[Path]:
    """The files that an engine of this checkpoint may map: of all its ranks and kernels."""
    if config.model.disable_packed_cache or config.execute.device != "cpu":
        return []
    try:
        key = checkpoint_key(config, folder, stamps_of(folder))
        return sorted(cache_folder(config).glob(f"{key}-*.packed"))
    except OSError:  # the engine reports what cannot be read
        return []


def cache_folder(config: ServerConfig) -> Path:
    """--packed-cache-dir, by default radixlm/packed in the user's cache folder."""
    if config.model.packed_cache_dir:
        return Path(config.model.packed_cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "radixlm" / "packed"


def stamps_of(folder: Path) -> tuple[Stamp, ...]:
    """The files of a checkpoint that decide what is packed; of other folders than the first, those
    one level below."""
    stamps = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.name.endswith((*WEIGHT_SUFFIXES, *_WEIGHT_CONFIGS)) and path.is_file():
            stat, name = path.stat(), str(path.relative_to(folder))
            times = stat.st_mtime_ns, stat.st_ctime_ns
            stamps.append(Stamp(name, stat.st_size, *times, stat.st_ino))
    return tuple(stamps)


def content_of(folder: Path, stamps: Sequence[Stamp]) -> str:
    """SHA-256 of the files, hex."""
    whole = hashlib.sha256()
    for stamp in stamps:
        with (folder / stamp.name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 of size and time of the code that decides what is packed: the kernels, and Python
    files."""
    root, digest = Path(radixlm.__file__).parent, hashlib.sha256()
    paths = [path for name in _PACKING_CODE for path in (root / name).rglob("*.py")]
    for path in sorted([*paths, *root.glob("_cpu*")]):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns} ".encode())
    return digest.hexdigest()
