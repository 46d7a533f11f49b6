"""Checkpoint folders that are made of files in other formats: some files are written, others are
links. They stand in the user's cache, one for each source and time of change."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError


def keep_folder(
    kind: str, source: Path, files: Mapping[str, Any], links: Mapping[str, Path]
) -> Path:
    """The folder made of ``source``: ``files`` hold the values as JSON, ``links`` lead to others.
    ConfigError if it cannot be written."""
    stats = [target.stat() for target in links.values()]
    said = [str(source), *(f"{stat.st_size}\0{stat.st_mtime_ns}" for stat in stats)]
    key = hashlib.sha256("\0".join(said).encode()).hexdigest()
    folder = _cache() / kind / key[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            _write(folder / name, json.dumps(value, ensure_ascii=False))
        for name, target in links.items():
            if not (folder / name).exists():
                _link(folder / name, target)
    except OSError as error:
        raise ConfigError(
            f"{source}: its config cannot be kept in {folder}: {error}; set XDG_CACHE_HOME"
        ) from error
    return folder


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "radixlm"


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
