"""The secret of servers that share a storage, and the tier of --enable-lmcache."""

from __future__ import annotations

from radixlm.base.private_files import read_secret
from radixlm.config.server_config import ServerConfig
from radixlm.tiers.base import Tier
from radixlm.tiers.manifest import Manifest
from radixlm.tiers.stores import make_store


def store_secret(config: ServerConfig) -> bytes:
    """The secret of --kv-store-secret-file; empty without it."""
    path = config.memory.kv_store_secret_file
    return b"" if path is None else read_secret(path)


def make_lmcache(config: ServerConfig, manifest: Manifest) -> list[Tier]:
    """The tier of --enable-lmcache; none without it."""
    if not config.memory.enable_lmcache:
        return []
    extra = {"config_file": config.memory.lmcache_config_file or ""}
    return [make_store("lmcache", extra, manifest, store_secret(config))]
