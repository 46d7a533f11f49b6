"""Forks: the pages of further paths of drafts, for one step.

A path shares the request's pages up to the one that its first token is in. Of that page it has a
copy, and pages of its own behind it. The pages of the path that was right change places with the
request's; then those of all paths are freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radixlm.memory.check import Holding
from radixlm.memory.pages import PageAllocator
from radixlm.step.plan import Int32Array

NO_SLOT = -1
_ROOM = 8  # times the pages of a path must be had before the prefix cache gives some up for it


class Fork(NamedTuple):
    """Pages for the columns from ``first`` on, of each page space."""

    first: int
    pages: tuple[Int32Array, ...]


class Forks:
    """By row of the page tables. ``spaces``: the page allocators."""

    def __init__(self, *spaces: PageAllocator) -> None:
        self._spaces = spaces
        self._by_row: dict[int, Fork] = {}

    @staticmethod
    def may_evict(num_pages: int, num_available: int) -> bool:
        """Whether so many pages may be taken from the prefix cache: they are free again after the
        step, and serve the next one."""
        return num_pages * _ROOM <= num_available

    def take(self, page_row: int, first: int, num_pages: int) -> Fork | None:
        """Free pages for a path; None if there are not enough."""
        pages: list[Int32Array] = []
        for space in self._spaces:
            found = space.alloc(num_pages)
            if found is None:
                for allocator, taken in zip(self._spaces, pages, strict=False):
                    allocator.free(taken)
                return None
            pages.append(found)
        fork = self._by_row[page_row] = Fork(first, tuple(pages))
        return fork

    def of(self, page_row: int) -> Fork:
        """The pages of a path."""
        return self._by_row[page_row]

    def free(self) -> None:
        """The step is over."""
        for fork in self._by_row.values():
            for space, pages in zip(self._spaces, fork.pages, strict=True):
                space.free(pages)
        self._by_row.clear()

    def holdings(self) -> Iterator[Holding]:
        """For the check of invariants."""
        for fork in self._by_row.values():
            full, *window = fork.pages
            yield Holding(NO_SLOT, full, None, window[0] if window else np.empty(0, np.int32))
