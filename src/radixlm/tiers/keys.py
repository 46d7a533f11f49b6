"""Keys of KV pages: a chain of SHA-256 over the tokens from the start, a key for each whole page.

    key[0] = SHA-256(seed || tokens of page 0)        key[i] = SHA-256(key[i-1] || tokens of page i)

Tokens are uint32 little-endian. The seed names all else that KV depends on, so that equal keys mean
equal KV in any process and after any restart. Placeholder ids of media are made of their content.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from radixlm.memory.prefix.base import TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace

KEY_BYTES: Final = 32
NO_KEY: Final = bytes(KEY_BYTES)  # the parent of a first page
REFERENCE_SEED: Final = b"sglang-cache-namespace-v1"
_EVENT_SEED: Final = b"sglang-kv-event-namespace-v1"


def namespace_seed(manifest_digest: bytes, namespace: CacheNamespace, secret: bytes = b"") -> bytes:
    """The seed of the chains of one namespace, 32 bytes. ``manifest_digest``: of the model, its
    weights and the KV format (``tiers/manifest.py``). ``secret``: of a store that others read too:
    tenant and cache_salt enter by an HMAC, so that nobody can compute another tenant's keys."""
    tenant = None
    if namespace.tenant is not None or namespace.cache_salt is not None:
        named = msgspec.msgpack.encode((namespace.tenant, namespace.cache_salt))
        tenant = hmac.digest(secret, named, "sha256")
    fields = (
        manifest_digest,
        namespace.weights_version,
        namespace.kv_layout,
        namespace.adapter,
        tenant,
        namespace.extra_key,
        namespace.rope_variant,
        namespace.earlier_media,
    )
    return hashlib.sha256(b"radixlm" + msgspec.msgpack.encode(fields)).digest()


def page_keys(ids: TokenIds, page_size: int, seed: bytes) -> list[bytes]:
    """The key of each whole page of ``ids``, int32 [num_tokens]."""
    keys: list[bytes] = []
    extend_keys(keys, ids, page_size, seed)
    return keys


def extend_keys(keys: list[bytes], ids: TokenIds, page_size: int, seed: bytes) -> None:
    """Appends the keys of those whole pages of ``ids`` that ``keys`` has none of yet."""
    first, end = len(keys), len(ids) // page_size
    if first >= end:
        return
    data = np.ascontiguousarray(ids[first * page_size : end * page_size], "<i4").tobytes()
    sha256, step, append = hashlib.sha256, 4 * page_size, keys.append
    key = keys[-1] if keys else seed
    for at in range(0, len(data), step):
        key = sha256(key + data[at : at + step]).digest()
        append(key)


def window_key(key: bytes) -> bytes:
    """The key of the window's or the state's page that belongs to the full page ``key``."""
    return hashlib.sha256(b"window" + key).digest()


def parents(keys: Sequence[bytes], first: int = 0) -> list[bytes]:
    """The key before each of ``keys[first:]``; zeros before the first page."""
    return [keys[i - 1] if i else NO_KEY for i in range(first, len(keys))]


# ---- the chain that SGLang 0.5.23 publishes in KV events ---------------------------------------


def reference_chain(
    ids: TokenIds, page_size: int, extra_key: str | None = None, cache_salt: str | None = None
) -> list[bytes]:
    """The digests of SGLang's chain, which has a seed only where one of the two texts is given."""
    parts = (extra_key, cache_salt)
    is_plain = extra_key is None and cache_salt is None
    return page_keys(ids, page_size, b"" if is_plain else reference_seed(REFERENCE_SEED, parts))


def reference_seed(name: bytes, parts: Iterable[str | None]) -> bytes:
    """SHA-256(name || for each part: 0x00 if absent, else 0x01 || bytes as uint64 LE || UTF-8)."""
    data = bytearray(name)
    for part in parts:
        data += b"\0" if part is None else b"\1" + len(part.encode()).to_bytes(8, "little")
        data += (part or "").encode()
    return hashlib.sha256(data).digest()


def event_hash(key: bytes) -> int:
    """A digest as the signed 64-bit hash of KV events: its first 8 bytes, big-endian."""
    return int.from_bytes(key[:8], "big", signed=True)


def dynamo_hash(key: bytes, extra_key: str | None, cache_salt: str | None) -> int:
    """The hash of the events' format "dynamo": where one of the two texts is given, it is hashed
    once more with a seed."""
    plain = event_hash(key)
    if extra_key is None and cache_salt is None:
        return plain
    seed = reference_seed(_EVENT_SEED, (extra_key, cache_salt))
    return event_hash(hashlib.sha256(seed + key[:8]).digest())
