"""A .gguf file, or several parts of one, as a checkpoint folder: config.json and tokenizer made of
its metadata, the weights by a link. The folder stands in the user's cache, one a file and time of
change."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from radixlm.arch.families.gguf import config_of
from radixlm.arch.gguf import read_header
from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.text.gguf_tokenizer import tokenizer_files
from radixlm.text.tokenizer import TOKENIZER_PROBLEM

WEIGHTS, PART = "model.gguf", "model-{:05d}-of-{:05d}.gguf"


def unpacked(file: Path) -> Path:
    """The folder of a file; CheckpointError if the file is broken or of an unknown kind."""
    file = file.absolute()  # where a link leads to, names may say nothing of parts
    header = read_header(file)
    files: dict[str, Any] = {"config.json": config_of(header)}
    try:
        files |= tokenizer_files(header.metadata, str(file)) or {}
    except CheckpointError as error:  # --tokenizer-path may be given: said when it is missed
        files[TOKENIZER_PROBLEM] = str(error)
    file, stats = header.path, [part.stat() for part in header.files]
    said = [str(file), *(f"{stat.st_size}\0{stat.st_mtime_ns}" for stat in stats)]
    key = hashlib.sha256("\0".join(said).encode()).hexdigest()
    folder = _cache() / key[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            _write(folder / name, json.dumps(value, ensure_ascii=False))
        for number, part in enumerate(header.files, 1):
            link = folder / (PART if len(header.files) > 1 else WEIGHTS).format(
                number, len(header.files)
            )
            if not link.exists():
                _link(link, part)
    except OSError as error:
        raise ConfigError(
            f"{file}: its config cannot be kept in {folder}: {error}; set XDG_CACHE_HOME"
        ) from error
    return folder


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "radixlm" / "gguf"


def _write(path: Path, text: str) -> None:
    """All or nothing: another process may read it now."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    new = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _link(path: Path, target: Path) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(path)
