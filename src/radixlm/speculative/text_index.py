"""TextIndex: token ids that grow at their end, and where the last of them occurred before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.step.plan import Int32Array

SEPARATOR = -1
"""Stands between two texts; no match crosses it."""
MAX_MATCH = 32
"""Longest match that is told apart, in tokens."""
MAX_CANDIDATES = 32
MAX_CHAIN = 6
_MULTIPLIER, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_MIN_BITS = 10
_MAX_INDEXED = 1 << 16


class Matches(Record, eq=False):
    """Earlier occurrences of the end of a text, the latest first: ``ends`` [m], the place of the
    last matching token; ``lengths`` [m], how many tokens match, at most MAX_MATCH."""

    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Chains:
    """The places at which n tokens occurred, by their hash: a head for each hash, and for each
    place the one before with the same hash (as in LZ77). Other tokens may share a hash."""

    def __init__(self, n: int, bits: int) -> None:
        """For at most 2 ** bits places."""
        self.n, self._bits = n, bits
        self._heads = np.full(1 << bits, -1, np.int32)
        self._previous = np.full(1 << bits, -1, np.int32)

    def insert(self, ids: Int32Array, first: int, end: int) -> None:
        """Add the places [first, end), each the last of n tokens of ``ids``."""
        first = max(first, self.n - 1)
        if first >= end:
            return
        hashes = self._hash(ids[first - self.n + 1 : end])
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], (order + first).astype(np.int32)
        is_first = np.ones(len(places), bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        before = np.roll(places, 1)
        before[is_first] = self._heads[hashes[is_first]]
        self._previous[places] = before
        is_last = np.roll(is_first, -1)
        is_last[-1] = True
        self._heads[hashes[is_last]] = places[is_last]

    def _hash(self, ids: Int32Array) -> NDArray[np.intp]:
        """The hash of each run of n tokens."""
        values = ids.astype(np.uint64)
        count = len(ids) - self.n + 1
        mixed = np.zeros(count, np.uint64)
        for offset in range(self.n):
            mixed = (mixed ^ values[offset : offset + count]) * np.uint64(_MULTIPLIER)
        return (mixed >> np.uint64(64 - self._bits)).astype(np.intp)

    def places(self, tail: list[int]) -> list[int]:
        """The latest places whose n tokens have the hash of the end of ``tail``."""
        if len(tail) < self.n:
            return []
        mixed = 0
        for token in tail[-self.n :]:  # as in _hash: numpy is slow for so few
            mixed = (mixed ^ token) * _MULTIPLIER & _WORD
        place = self._heads.item(mixed >> (64 - self._bits))
        found: list[int] = []
        while place >= 0 and len(found) < MAX_CANDIDATES:
            found.append(place)
            place = self._previous.item(place)
        return found


class TextIndex:
    """``ids`` [num_tokens] with chains of 6 and of 2 tokens: the long ones find the places that go
    on alike in repetitive text, the short ones find any."""

    def __init__(self, ids: Int32Array | None = None) -> None:
        self._ids = np.zeros(64, np.int32)
        self.num_tokens = 0
        self._num_indexed = 0
        self._bits = 0
        self._chains: tuple[Chains, ...] = ()
        if ids is not None:
            self.extend(ids)

    @property
    def ids(self) -> Int32Array:
        """int32 [num_tokens], a view."""
        return self._ids[: self.num_tokens]

    def extend(self, ids: Int32Array) -> None:
        """Append tokens; they are indexed later, many at once."""
        end = self.num_tokens + len(ids)
        if end > len(self._ids):
            grown = np.zeros(max(end, 2 * len(self._ids)), np.int32)
            grown[: self.num_tokens] = self.ids
            self._ids = grown
        self._ids[self.num_tokens : end] = ids
        self.num_tokens = end

    def find(self, tail: Int32Array, min_match: int = 2, lag: int = 16) -> Matches | None:
        """Where the end of ``tail`` occurs, at least ``min_match`` tokens of it and with a token
        behind it; None if nowhere. The last ``lag`` tokens may not be indexed yet."""
        self._index(lag)
        last, item = tail[-MAX_CHAIN:].tolist(), self._ids.item
        for chains in self._chains:
            # most of those that only share a hash differ here, and cost no numpy
            places = [
                place
                for place in chains.places(last)
                if item(place) == last[-1] and item(place - 1) == last[-2]
            ]
            if not places:
                continue
            ends = np.array(places, np.int64)
            lengths = self._match_lengths(ends, tail)
            is_match = lengths >= max(min_match, chains.n)
            if is_match.any():
                return Matches(ends[is_match], lengths[is_match])
        return None

    def _index(self, lag: int) -> None:
        """Index tokens that are not, at most _MAX_INDEXED at once: a step waits for it."""
        end = self.num_tokens - 1  # the last place has nothing behind it
        if end - self._num_indexed < (lag if self._num_indexed else 1):
            return
        if end > 1 << self._bits or not self._bits:
            self._bits = max(_MIN_BITS, self.num_tokens.bit_length())
            self._chains = (Chains(MAX_CHAIN, self._bits), Chains(2, self._bits))
            self._num_indexed = 0
        end = min(end, self._num_indexed + _MAX_INDEXED)
        for chains in self._chains:
            chains.insert(self._ids, self._num_indexed, end)
        self._num_indexed = end

    def _match_lengths(self, ends: NDArray[np.int64], tail: Int32Array) -> NDArray[np.int64]:
        back = np.arange(min(len(tail), MAX_MATCH))
        places = ends[:, None] - back
        is_equal = self._ids[np.maximum(places, 0)] == tail[::-1][: len(back)]
        is_equal &= places >= 0
        lengths: NDArray[np.int64] = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        return lengths

    def following(self, ends: NDArray[np.int64], count: int) -> Int32Array:
        """The ``count`` tokens behind each of the places, int32 [m, count]. Where the text ends
        before, what lies between the place and the end is repeated, as a loop would be."""
        period = self.num_tokens - 1 - ends
        places = ends[:, None] + 1 + np.arange(count) % period[:, None]
        return self._ids[places]
