"""The JSON files of a checkpoint folder. A start reads config.json a dozen times; the file is read
from disk once."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from radixlm.base.errors import CheckpointError

_TAG = "__float__"  # under which transformers writes infinities, as the only key of an object


def read_json(path: Path) -> Any:
    """The file's value, a new one for each caller; CheckpointError for a file that is missing,
    truncated or not JSON."""
    try:
        stat = path.stat()
        data = _bytes(path, (stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size))
        return json.loads(data, object_hook=_untagged if _TAG.encode() in data else None)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # truncated, not JSON, not UTF-8, too deep
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """As ``read_json``, for a file that must hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def object_or_empty(path: Path) -> dict[str, Any]:
    """As ``read_object``, but {} where the file is missing or broken: required files are checked
    elsewhere."""
    try:
        return read_object(path)
    except CheckpointError:
        return {}


def _untagged(value: dict[str, Any]) -> Any:
    return float(value[_TAG]) if set(value) == {_TAG} else value


@lru_cache(maxsize=16)
def _bytes(path: Path, version: tuple[int, int, int]) -> bytes:
    """The file's bytes, not its value: callers change the value that they get."""
    return path.read_bytes()
