"""In which order the tree forgets: policies, and the queue that all of them share."""

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from radixlm.base.errors import ConfigError
from radixlm.memory.prefix.node import Node

Rank = Callable[[Node], int]
"""The smaller, the sooner evicted. Must never fall while a node lives: the queue relies on it."""

_CLOCK_BITS: Final = 48
_PROTECTED_HITS: Final = 2


lru: Final[Rank] = attrgetter("last_access")
"""Least recently used first."""

window_lru: Final[Rank] = attrgetter("window_access")
"""The order of window pages: when a match last ended so close that it needed them."""


def lfu(node: Node) -> int:
    """Least often matched first; among equals the least recently used."""
    return (node.num_hits << _CLOCK_BITS) | node.last_access


def slru(node: Node) -> int:
    """Those first that were matched less than twice; among equals the least recently used."""
    return (node.num_hits >= _PROTECTED_HITS) << _CLOCK_BITS | node.last_access


POLICIES: Final[dict[str, Rank]] = {"lru": lru, "lfu": lfu, "slru": slru}


def policy(name: str) -> Rank:
    """The rank function of ``--radix-eviction-policy``; ConfigError if unknown."""
    if name not in POLICIES:
        raise ConfigError(f"unknown radix eviction policy {name!r}: use one of {sorted(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """Candidates in the order of their ranks, which are looked at again only when one comes up.

    A use costs nothing here; it makes an entry stale, and ranks only rise, so an entry that still
    has its rank when popped is the smallest. The caller checks that a popped node may go.

    Entries stand in a sorted run, made when many are stale, or in a heap of those that came since.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._run: list[Node] = []  # the next one last
        self._run_ranks: list[int] = []
        self._heap: list[tuple[int, int, Node]] = []
        self._members: dict[Node, None] = {}  # an ordered set: the same calls, the same order
        self._num_stale = 0

    def push(self, node: Node) -> None:
        """Makes ``node`` a candidate if it is none."""
        if node not in self._members:
            self._members[node] = None
            heapq.heappush(self._heap, (self._rank(node), node.serial, node))

    def discard(self, node: Node) -> None:
        """``node`` is a candidate no more; its entry goes when it comes up or in a clean-up."""
        if node in self._members:
            del self._members[node]
            if len(self._heap) + len(self._run) > 2 * len(self._members) + 64:
                self._rebuild()

    def pop(self) -> Node | None:
        """The candidate of smallest rank, which is a candidate no more; None if there is none."""
        heap, run, members = self._heap, self._run, self._members
        while run or heap:
            if run and (not heap or self._run_ranks[-1] <= heap[0][0]):
                node, rank = run.pop(), self._run_ranks.pop()
            else:
                rank, _, node = heapq.heappop(heap)
            if node not in members:
                continue
            now = self._rank(node)
            if now == rank:
                del members[node]
                return node
            heapq.heappush(heap, (now, node.serial, node))
            self._num_stale += 1
            if self._num_stale > len(members) // 8:
                self._rebuild()
        return None

    def first(self, count: int) -> list[Node]:
        """Up to ``count`` of the candidates that come up next, in order; changes nothing."""
        return heapq.nsmallest(count, self._members, key=self._rank)

    def _rebuild(self) -> None:
        """Ranks all candidates anew and sorts them."""
        self._run[:] = sorted(self._members, key=self._rank, reverse=True)
        self._run_ranks[:] = map(self._rank, self._run)
        self._heap.clear()
        self._num_stale = 0
