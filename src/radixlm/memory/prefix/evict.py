"""In which order the tree forgets: policies, and the queue that all of them share."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from radixlm.base.errors import ConfigError
from radixlm.memory.prefix.node import Node

Rank = Callable[[Node], int]
"""The smaller, the sooner evicted. Must never fall while a node lives: the queue relies on it."""

_CLOCK_BITS: Final = 48


def lru(node: Node) -> int:
    """Least recently used first."""
    return node.last_access


def lfu(node: Node) -> int:
    """Least often matched first; among equals the least recently used."""
    return (node.num_hits << _CLOCK_BITS) | node.last_access


def window_lru(node: Node) -> int:
    """The order of window pages: when a match last ended so close that it needed them."""
    return node.window_access


POLICIES: Final[dict[str, Rank]] = {"lru": lru, "lfu": lfu}


def policy(name: str) -> Rank:
    """The rank function of ``--radix-eviction-policy``; ConfigError if unknown."""
    if name not in POLICIES:
        raise ConfigError(f"unknown radix eviction policy {name!r}: use one of {sorted(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """A lazy heap of candidates: a node's rank is looked at again only when it comes up.

    A use costs nothing here; it makes an entry stale, and ranks only rise, so an entry that still
    has its rank when popped is the smallest. The caller checks that a popped node may go.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[int, int, Node]] = []
        self._members: set[Node] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, node: Node) -> None:
        """Makes ``node`` a candidate if it is none."""
        if node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (self._rank(node), node.serial, node))

    def discard(self, node: Node) -> None:
        """``node`` is a candidate no more; its entry goes when it comes up or in a clean-up."""
        if node in self._members:
            self._members.remove(node)
            if len(self._heap) > 2 * len(self._members) + 64:
                self._heap = [(self._rank(n), n.serial, n) for n in self._members]
                heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The candidate of smallest rank, which is a candidate no more; None if there is none."""
        heap = self._heap
        while heap:
            rank, serial, node = heap[0]
            if node not in self._members:
                heapq.heappop(heap)
                continue
            now = self._rank(node)
            if now != rank:
                heapq.heapreplace(heap, (now, serial, node))
                continue
            heapq.heappop(heap)
            self._members.remove(node)
            return node
        return None

    def clear(self) -> None:
        """No candidates."""
        self._heap.clear()
        self._members.clear()
