"""LoadOptions: --model-loader-extra-config and --weight-loader-disable-mmap, as one record."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, replace

NUM_THREADS: Final = 8
WINDOW_BYTES: Final = 256 << 20
_FLAG: Final = "--model-loader-extra-config"


class LoadOptions(Record):
    """``num_threads``: of reads; 0: files are mapped. ``window_bytes``: buffers that are read
    ahead. ``pattern``: names of sharded_state's files, with {rank} and {part}; ``rank``: whose."""

    num_threads: int = 0
    window_bytes: int = WINDOW_BYTES
    pattern: str = "model-rank-{rank}-part-{part}.safetensors"
    rank: int = 0


DEFAULT: Final = LoadOptions()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 40


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def is_pattern(value: Any) -> bool:
    """Whether it may name the files of sharded_state."""
    return isinstance(value, str) and "{rank}" in value and "{part}" in value and "/" not in value


_Keys = Mapping[str, tuple[Callable[[Any], bool], str]]
_FILES: _Keys = {
    "enable_multithread_load": (_is_bool, "true"),
    "num_threads": (_is_count, "8"),
}
_REMOTE: _Keys = {
    "concurrency": (_is_count, "8"),
    "memory_limit": (_is_count, "268435456"),
    "distributed": (_is_bool, "true"),  # changes nothing: each rank reads its part
}
_KEYS: Final[Mapping[str, _Keys]] = {
    **dict.fromkeys(
        ("auto", "safetensors", "pt", "layered", "fastsafetensors", "bitsandbytes", "mistral"),
        _FILES,
    ),
    **dict.fromkeys(("remote", "remote_instance"), _REMOTE),
    "sharded_state": {"pattern": (is_pattern, '"model-rank-{rank}-part-{part}.safetensors"')},
}


def read_options(
    text: str | Mapping[str, Any] | None, load_format: str, disable_mmap: bool = False
) -> LoadOptions:
    """The options of a load format; ConfigError for keys that it does not have, and for values that
    do not fit."""
    try:
        given = json.loads(text or "{}") if isinstance(text, str) else dict(text or {})
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: {error}; expected a JSON object") from error
    known = _KEYS.get(load_format, {})
    for key, value in given.items():
        if key not in known:
            keys = f"its keys: {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"{_FLAG}: --load-format {load_format} has no key {key!r}; {keys}")
        is_good, example = known[key]
        if not is_good(value):
            raise ConfigError(f"{_FLAG}: {key}: {value!r} is no fit; for example {example}")
    threads = given.get("num_threads", NUM_THREADS)
    is_threaded = given.get("enable_multithread_load") or load_format == "fastsafetensors"
    options = LoadOptions(
        num_threads=given.get("concurrency", threads if is_threaded else int(disable_mmap)),
        window_bytes=given.get("memory_limit", WINDOW_BYTES),
    )
    return replace(options, pattern=given["pattern"]) if "pattern" in given else options
