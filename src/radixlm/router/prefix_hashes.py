"""Hashes of the prefixes of token ids, which do not depend on any worker's block size.

    hash(tokens + [t]) = (hash(tokens) + mix(t)) * BASE  mod 2^64      hash([]) = of the namespace

All prefixes are hashed at once by a running sum of mix(t) / BASE^i. The hashes choose a worker and
no more: two prefixes with one hash cost time, not a wrong answer. Constants are drawn by process.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
TokenIds = npt.NDArray[np.int32]
Namespace = tuple[str | None, str | None, str | None]
"""Adapter's name, cache_salt, extra_key: what KV depends on besides the tokens."""
PLAIN: Final[Namespace] = (None, None, None)

MAX_BLOCK: Final = 1 << 16
_MASK: Final = (1 << 64) - 1
_SHIFT: Final = np.uint64(31)


class PrefixHashes:
    """One function of hashing. ``key``: 32 bytes that fix it, drawn where it is None."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        factor, base = (
            int.from_bytes(hashlib.blake2b(name, key=self._key, digest_size=8).digest()) | 1
            for name in (b"factor", b"base")
        )
        base = (base & ~7) | 5  # its powers repeat after 2^62 only
        self._factor = np.uint64(factor)
        self._up = _powers(base)
        self._down = _powers(pow(base, -1, _MASK + 1))
        self._starts: dict[Namespace, int] = {}

    def start(self, namespace: Namespace = PLAIN) -> int:
        """The hash of no tokens."""
        known = self._starts.get(namespace)
        if known is None:
            if len(self._starts) > 1000:  # names that clients choose
                self._starts.clear()
            data = msgspec.msgpack.encode(namespace)
            digest = hashlib.blake2b(data, key=self._key, digest_size=8).digest()
            known = self._starts[namespace] = int.from_bytes(digest)
        return known

    def of(self, ids: TokenIds, every: int, start: int) -> Words:
        """Hashes of the prefixes of ``every``, 2 x ``every``, ... tokens. ``ids``: int32 [n];
        ``start``: hash of what stands before; ``every``: at most MAX_BLOCK."""
        step = MAX_BLOCK // every * every
        parts: list[Words] = []
        for at in range(0, len(ids) // every * every, step):
            part = self._chunk(ids[at : at + step], every, start)
            start = int(part[-1])
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def _chunk(self, ids: TokenIds, every: int, start: int) -> Words:
        count = len(ids) // every
        end = count * every
        mixed = (ids[:end].astype(np.uint64) + np.uint64(1)) * self._factor
        mixed ^= mixed >> _SHIFT
        parts = mixed.reshape(count, every), self._down[:end].reshape(count, every)
        sums = np.cumsum(np.einsum("ij,ij->i", *parts)) + np.uint64(start)
        return sums * self._up[every : end + 1 : every]


def _powers(base: int) -> Words:
    """base^0 to base^MAX_BLOCK, mod 2^64."""
    factors = np.full(MAX_BLOCK + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
