"""--enable-hierarchical-cache: the host tier and the storage below it, from their flags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, replace
from radixlm.base.system_memory import system_memory
from radixlm.base.units import format_bytes
from radixlm.config.host import total_memory_bytes
from radixlm.config.memory import MemoryConfig
from radixlm.config.server_config import ServerConfig
from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.features.page_puts import WriteBack, WritePolicy, WriteThrough
from radixlm.engine.stores import store_secret
from radixlm.tiers.base import Tier
from radixlm.tiers.codec import Codec
from radixlm.tiers.files import Files, trusted_folder
from radixlm.tiers.host import HostTier
from radixlm.tiers.manifest import Manifest
from radixlm.tiers.prefault import room_bytes
from radixlm.tiers.row_memory import RowMemory
from radixlm.tiers.segments import SegmentTier
from radixlm.tiers.stores import make_store, read_extra

log = logging.getLogger(__name__)

Extra = Mapping[str, Any] | str | None
LONG_PREFIX_TOKENS: Final = 1024
_EXTRA: Final = "--hicache-storage-backend-extra-config"
_GB: Final = 1_000_000_000
_FREE_SHARE, _MAX_FREE_BYTES = 0.1, 10 * _GB  # of the RAM, that stay free
_MAX_DISK_BYTES: Final = 64 * _GB  # without max_size_gb; half of what is free, if less
_OPEN_S: Final = 5.0  # to read which pages a folder has; a slower one is read on behind the steps
_PREFETCH: Final = {
    "prefetch_threshold": "min_tokens",
    "prefetch_timeout_base": "timeout_base_s",
    "prefetch_timeout_per_ki_token": "timeout_per_ki_s",
    "prefetch_timeout_max": "timeout_max_s",
}
_NO_EFFECT: Final = "hicache_storage_pass_prefix_keys"  # a page's key names all before it
_FILE_OPTIONS: Final = ("directory", "max_size_gb", "min_free_gb")


class SecondHit(WritePolicy):
    """--hicache-write-policy write_through_selective: the pages of a request that found some of
    them in the prefix cache, and long prefixes at once."""

    def __init__(self, page_size: int) -> None:
        self._long_pages = LONG_PREFIX_TOKENS // page_size

    def first_page(self, num_cached: int, num_put: int, num_pages: int) -> int | None:
        if not num_cached and num_pages < self._long_pages:
            return None
        return 0 if num_put <= num_cached else num_put


def write_policy(memory: MemoryConfig, page_size: int) -> WritePolicy:
    """What --hicache-write-policy says."""
    if memory.hicache_write_policy == "write_through_selective":
        return SecondHit(page_size)
    return WriteBack() if memory.hicache_write_policy == "write_back" else WriteThrough()


class Hicache(Record, eq=False):
    """``tiers``, from the fastest; ``attach(name, extra)`` makes a storage of a running server."""

    tiers: list[Tier]
    attach: Callable[[str, Extra], Tier]


def make_hicache(
    config: ServerConfig,
    manifest: Manifest,
    pool_bytes: int,
    free_bytes: int,
    lazy_bytes: int = 0,
    *,
    is_restart: bool = False,
) -> Hicache | None:
    """The tiers of the flags; None without --enable-hierarchical-cache. ``pool_bytes``: of the KV
    cache of this rank; ``free_bytes``: of RAM for this process, of which the KV cache takes
    ``lazy_bytes`` as it fills; ``is_restart``: a folder that cannot be written keeps no engine from
    starting that began before. ConfigError."""
    memory = config.memory
    if not memory.enable_hierarchical_cache:
        return None
    codec, secret = Codec(), store_secret(config)
    total_bytes = total_memory_bytes(system_memory().total)
    kept_free = int(min(_MAX_FREE_BYTES, _FREE_SHARE * total_bytes))
    room = free_bytes - kept_free // config.parallel.num_processes
    budget = host_bytes(memory, pool_bytes, room, lazy_bytes)
    rows = None
    if manifest.page_bytes[0] and not memory.enable_memory_saver:
        rows = RowMemory(manifest.page_bytes[0], min(budget, room_bytes(free_bytes)))
    host = HostTier(budget, codec, rows=rows)

    def storage(name: str, given: Extra, *, by_flag: bool = False) -> Tier:
        extra = read_extra(given, by_flag)
        extra.pop(_NO_EFFECT, None)
        if not by_flag and (later := [key for key in extra if key in _PREFETCH]):
            raise ConfigError(f"{later[0]}: it can be given by flag only, at the start")
        extra = {key: value for key, value in extra.items() if key not in _PREFETCH}
        if "directory" in extra and not by_flag:
            raise ConfigError("directory: a folder can be named by flag only, at the start")
        if name != "file":
            return make_store(name, extra, manifest, secret, by_flag)
        host.below = made = make_segments(
            extra, manifest, codec, host, secret, was_good=is_restart and by_flag
        )
        return made

    tiers: list[Tier] = [host]
    if (name := memory.hicache_storage_backend) is not None:
        tiers.append(storage(name, memory.hicache_storage_backend_extra_config, by_flag=True))
    return Hicache(tiers, storage)


def arrival_options(memory: MemoryConfig, options: ArrivalOptions) -> ArrivalOptions:
    """``options`` with what the flags say about waiting."""
    extra = read_extra(memory.hicache_storage_backend_extra_config)
    given = {}
    for name, field in _PREFETCH.items():
        value = extra.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{_EXTRA}: {name} is {value!r}; a number such as 1 works")
        if name in extra:
            given[field] = value
    return replace(options, policy=memory.hicache_storage_prefetch_policy, **given)


def host_bytes(memory: MemoryConfig, pool_bytes: int, room: int, lazy_bytes: int) -> int:
    """Bytes of the host tier, of ``room`` that may be taken. --hicache-ratio is for tokens: as many
    as pages that do not compress need, and not what the KV cache has yet to take."""
    if memory.hicache_size:
        if memory.hicache_size * _GB > room:
            raise ConfigError(
                f"--hicache-size {memory.hicache_size}: {format_bytes(max(0, room))} of RAM may be "
                f"taken; --hicache-size {max(1, room // _GB)} works"
            )
        return memory.hicache_size * _GB
    wanted, room = int(memory.hicache_ratio * pool_bytes), room - lazy_bytes
    if wanted > room:
        given, asked = format_bytes(max(0, room)), format_bytes(wanted)
        log.info("the host tier gets %s of RAM, not the %s of --hicache-ratio", given, asked)
    return max(0, min(wanted, room))


def make_segments(
    extra: Mapping[str, Any],
    manifest: Manifest,
    codec: Codec,
    host: HostTier,
    secret: bytes,
    *,
    was_good: bool = False,
) -> SegmentTier:
    """--hicache-storage-backend file. ConfigError for a folder that cannot be used, unless that
    ``was_good``."""
    for name, value in extra.items():
        if name not in _FILE_OPTIONS:
            raise ConfigError(f"{_EXTRA}: file has no {name!r}; it has {', '.join(_FILE_OPTIONS)}")
        if name == "directory" and not isinstance(value, str):
            raise ConfigError(f'{_EXTRA}: directory is {value!r}; "/var/cache/radixlm" works')
        if name != "directory" and not (isinstance(value, int | float) and 0 < value < 1e9):
            raise ConfigError(f"{_EXTRA}: {name} is {value!r}; a number such as 64 works")
    default = env.HICACHE_FILE_DIR.get() or Path.home() / ".cache" / "radixlm" / "kv"
    path = Path(extra.get("directory") or default)
    folder = trusted_folder(path, f"{_EXTRA} directory", was_good=was_good)
    budget = _MAX_DISK_BYTES
    with suppress(OSError):
        budget = min(budget, Files().free_bytes(folder) // 2)
    tier = SegmentTier(
        folder,
        manifest.storage_digest,
        codec,
        int(extra["max_size_gb"] * _GB) if "max_size_gb" in extra else budget,
        secret=secret,
        min_free_bytes=int(extra.get("min_free_gb", 1) * _GB),
        on_packed=host.offer,
    )
    tier.flush(_OPEN_S)  # the first prompt finds what a server before this one has kept
    return tier
