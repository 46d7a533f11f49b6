"""Stores of pages outside the server, by name."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from radixlm.base.errors import ConfigError
from radixlm.base.registry import Registry
from radixlm.tiers.manifest import Manifest
from radixlm.tiers.stores.base import FLAG, StoreOptions, read_options
from radixlm.tiers.stores.grid import Grid
from radixlm.tiers.stores.tier import StoreTier

_HERE: Final = "radixlm.tiers.stores"
STORES: Final = Registry(
    "--hicache-storage-backend",
    {
        "shared_file": f"{_HERE}.file:FileStore",
        "redis": f"{_HERE}.redis:RedisStore",
        "s3": f"{_HERE}.s3:S3Store",
        "mooncake": f"{_HERE}.mooncake:MooncakeStore",
        "nixl": f"{_HERE}.nixl:NixlStore",
        "hf3fs": f"{_HERE}.hf3fs:Hf3fsStore",
        "lmcache": f"{_HERE}.lmcache:LmcacheStore",
        "dynamic": f"{_HERE}.dynamic:DynamicStore",
    },
)


def make_store(
    name: str,
    extra: Mapping[str, Any] | str | None,
    manifest: Manifest,
    secret: bytes = b"",
    by_flag: bool = True,
) -> StoreTier:
    """The storage ``name`` as a tier for the pages of ``manifest``. ``extra``: its options, as in
    ``read_extra``. ``secret``: of --kv-store-secret-file. ``by_flag``: False where a route asks,
    which may neither name code to be run nor files to be read.

    A store that cannot be reached is no error here: it is asked again when pages are.
    """
    extra = read_extra(extra, by_flag)
    if name == "dynamic" and not by_flag:
        raise ConfigError("a storage of class `dynamic` runs code: choose it by flag, at the start")
    if not by_flag and (named := [option for option in extra if option.endswith("_file")]):
        raise ConfigError(f"{named[0]}: a file can be named by flag only, at the start")
    kind = STORES.resolve(name)
    options: StoreOptions = read_options(name, extra, kind.Options)
    grid = Grid(manifest, options)
    store = kind(options, f"radixlm1-{grid.digest.hex()[:16]}")
    return StoreTier(store, name, grid, secret, options)


def read_extra(extra: Mapping[str, Any] | str | None, by_flag: bool = True) -> dict[str, Any]:
    """--hicache-storage-backend-extra-config: a mapping, a JSON object, or "@" and the path of a
    file with JSON, YAML or TOML (by its suffix). ConfigError if it is none."""
    if not isinstance(extra, str):
        return dict(extra or {})
    if extra.startswith("@") and not by_flag:
        raise ConfigError(f"{FLAG}: a file can be named by flag only; give the JSON object")
    path = Path(extra[1:]) if extra.startswith("@") else None
    text = extra if path is None else _text(path)
    try:
        if path is not None and path.suffix in (".yaml", ".yml"):
            loaded = importlib.import_module("yaml").safe_load(text)
        elif path is not None and path.suffix == ".toml":
            loaded = tomllib.loads(text)
        else:
            loaded = json.loads(text)
    except Exception as error:  # of three parsers
        raise ConfigError(f"{FLAG}: not readable: {error}; an example is {{}}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f'{FLAG}: {extra!r} is no object such as {{"deadline_s": 2}}')
    return loaded


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}: cannot read {path}: {error}") from error
