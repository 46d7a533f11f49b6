"""BlockTable: 64-bit keys with a 64-bit value each, in about a quarter of a dict's memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import numpy as np

_NUM_SHARDS: Final = 32
_SHIFT: Final = 59
_MIN_RECENT: Final = 32
_MAX_RECENT_SHARE: Final = 8  # of a shard's entries: one in so many waits in its dict
_MAX_MISSING_SHARE: Final = 4
RECENT_BYTES: Final = 130  # of an entry of a dict: its slot and two integers
SORTED_BYTES: Final = 16


class _Shard:
    """Entries sorted by key, and a dict of those that came since. The value 0 is "missing"."""

    __slots__ = ("keys", "num_missing", "recent", "values")

    def __init__(self) -> None:
        self.num_missing = 0  # of the sorted entries
        self.recent: dict[int, int] = {}
        self.keys, self.values = array("Q"), array("Q")

    def merge(self) -> None:
        """Sort the recent entries in, and drop the missing."""
        count = len(self.recent)
        keys = np.fromiter(self.recent.keys(), np.uint64, count)
        values = np.fromiter(self.recent.values(), np.uint64, count)
        keys = np.concatenate([np.frombuffer(self.keys, np.uint64), keys])
        values = np.concatenate([np.frombuffer(self.values, np.uint64), values])
        keys, values = keys[values != 0], values[values != 0]
        order = np.argsort(keys, kind="stable")
        self.keys, self.values = array("Q"), array("Q")
        self.keys.frombytes(keys[order].tobytes())
        self.values.frombytes(values[order].tobytes())
        self.recent.clear()
        self.num_missing = 0


class BlockTable:
    """Values of keys; a key is "missing" while its value is 0. Keys are spread evenly already."""

    def __init__(self) -> None:
        self._shards = [_Shard() for _ in range(_NUM_SHARDS)]
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, nearly."""
        shards = self._shards
        recent = sum(len(shard.recent) for shard in shards)
        return recent * RECENT_BYTES + sum(len(shard.keys) for shard in shards) * SORTED_BYTES

    def get(self, key: int) -> int:
        """The value of ``key``, 0 if it is missing."""
        shard = self._shards[key >> _SHIFT]
        value = shard.recent.get(key)
        if value is not None:
            return value
        keys = shard.keys
        at = bisect_left(keys, key)
        return shard.values[at] if at < len(keys) and keys[at] == key else 0

    def set(self, key: int, value: int) -> int:
        """Give ``key`` a value, or none with 0; returns the one that it had."""
        shard = self._shards[key >> _SHIFT]
        recent, keys = shard.recent, shard.keys
        old = recent.get(key)
        if old is not None:
            recent[key] = value
        else:
            at = bisect_left(keys, key)
            if at < len(keys) and keys[at] == key:
                old = shard.values[at]
                shard.values[at] = value
                shard.num_missing += (value == 0) - (old == 0)
                if shard.num_missing > _MIN_RECENT + len(keys) // _MAX_MISSING_SHARE:
                    shard.merge()
            elif value == 0:
                return 0
            else:
                old = 0
                recent[key] = value
                if len(recent) > _MIN_RECENT + len(keys) // _MAX_RECENT_SHARE:
                    shard.merge()
        self._num_keys += (value != 0) - (old != 0)
        return old

    def items(self) -> Iterator[tuple[int, int]]:
        """All keys with their values; the table must not change meanwhile."""
        for shard in self._shards:
            yield from ((key, value) for key, value in shard.recent.items() if value)
            yield from ((k, v) for k, v in zip(shard.keys, shard.values, strict=True) if v)

    def mask(self, kept: int) -> None:
        """Keep the bits ``kept`` of all values."""
        bits = np.uint64(kept)
        for shard in self._shards:
            if len(shard.values):
                values = np.frombuffer(shard.values, np.uint64)
                values &= bits
            for key in shard.recent:
                shard.recent[key] &= kept
        for shard in self._shards:
            shard.merge()
        self._num_keys = sum(len(shard.keys) for shard in self._shards)
