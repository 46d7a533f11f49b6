"""The prefix cache of ``--disable-radix-cache``: keeps nothing, shares nothing."""

from collections.abc import Hashable, Iterable
from typing import Final

import numpy as np

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Audit, Handle, InsertResult, Lock, Match, Tail, TokenIds

_NO_PAGES: Final = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class ChunkCache:
    """Each request keeps its pages from its first chunk to its end; the caller owns them all."""

    def __init__(self, page_size: int, is_hybrid: bool = False) -> None:
        self.page_size = page_size
        self._handle = Handle()
        self._window_pages = _NO_PAGES if is_hybrid else None

    def match(self, ids: TokenIds, namespace: Hashable = None) -> Match:
        """Never a hit."""
        return Match(self._handle, _NO_PAGES, 0, self._window_pages)

    def peek(self, ids: TokenIds, namespace: Hashable = None) -> int:
        return 0

    def lock(self, handle: Handle) -> None:
        """Nothing to keep."""

    def unlock(self, handle: Handle, is_window_locked: bool = True) -> None:
        """Nothing to let go."""

    def unlock_window(self, handle: Handle) -> None:
        """Nothing to let go."""

    def insert(
        self,
        ids: TokenIds,
        pages: PageIds,
        namespace: Hashable = None,
        window_pages: PageIds | None = None,
    ) -> InsertResult:
        """Takes no page over."""
        return InsertResult(
            self._handle, 0, 0, _NO_PAGES, _NO_PAGES, self._window_pages, self._window_pages
        )

    def find_tail(
        self, handle: Handle, ids: TokenIds, namespace: Hashable = None, at_least: int = 1
    ) -> Tail | None:
        """Never a hit."""
        return None

    def insert_tail(
        self,
        handle: Handle,
        ids: TokenIds,
        page: int,
        namespace: Hashable = None,
        window_page: int | None = None,
    ) -> bool:
        """Takes no page over."""
        return False

    num_evicted = 0

    def evict(self, num_pages: int) -> int:
        """Nothing to free."""
        return 0

    def evict_window(self, num_pages: int) -> int:
        """Nothing to free."""
        return 0

    def reset(self) -> None:
        """Nothing to forget."""

    @property
    def num_evictable(self) -> int:
        return 0

    @property
    def num_window_evictable(self) -> int:
        return 0

    @property
    def num_locked(self) -> int:
        return 0

    @property
    def total_pages(self) -> int:
        return 0

    def audit(self, locks: Iterable[Lock], is_repair: bool = False) -> Audit:
        """It owns nothing, so nothing is violated."""
        none = [_NO_PAGES for _ in locks]
        return Audit([], _NO_PAGES, _NO_PAGES, none, none)
