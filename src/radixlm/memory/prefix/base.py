"""What the scheduler asks of a prefix cache, with or without sharing."""

from collections.abc import Hashable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.memory.pages import PageIds

TokenIds = NDArray[np.int32]
_NO_PAGES: Final = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class Handle:
    """A cached prefix: what ``match`` and ``insert`` give, ``lock`` and ``unlock`` take.

    Unless locked it is good only until the next call of ``evict`` or ``reset``.
    """

    __slots__ = ()


class Match(Record):
    """The longest usable cached prefix: ``num_tokens`` tokens, ``len(pages)`` whole pages.

    ``window_pages`` (hybrid caches only) is as long as ``pages``; entries before the window are 0.
    """

    handle: Handle
    pages: PageIds
    num_tokens: int
    window_pages: PageIds | None = None


class Tail(Record):
    """A cached page whose first ``num_tokens`` tokens, fewer than a page, follow a prefix.

    The page stays the cache's: its rows are to be copied before the next step writes.
    """

    page: int
    num_tokens: int
    window_page: int | None = None


class InsertResult(Record):
    """Who owns what after ``insert``.

    handle: the cached prefix, to be locked by a request that goes on.
    num_cached_pages: the cache now owns one page for each of the first so many; the caller keeps
        those behind (0 in a cache that keeps nothing).
    num_shared_pages: of these, how many were cached before the call.
    pages: the cache's page ids, [num_cached_pages], for the table of a request that goes on.
    duplicate_pages: pages of the caller whose place was taken by other pages; still the caller's,
        who frees them (once no running step reads them).
    window_pages, duplicate_window_pages: the same of the window group, None without one.
    """

    handle: Handle
    num_cached_pages: int
    num_shared_pages: int
    pages: PageIds
    duplicate_pages: PageIds
    window_pages: PageIds | None = None
    duplicate_window_pages: PageIds | None = None


class CacheEvents(Protocol):
    """Told of every page that enters or leaves the cache (KV events for routers)."""

    def on_store(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> None:
        """``pages`` now hold ``token_ids``; they follow ``parent_page`` (None at the start)."""

    def on_remove(self, pages: PageIds) -> None:
        """``pages`` are no longer cached."""

    def on_reset(self) -> None:
        """Nothing is cached any more."""


class PrefixCache:
    """Owner of the KV pages of finished prefixes. All counts are of pages of the full group.

    This one keeps and shares nothing (``--disable-radix-cache``): the pages of a request are the
    caller's from its first chunk to its end. ``RadixCache`` keeps them.
    """

    num_evicted = 0  # pages that were freed for others so far
    num_locked = 0  # pages that locks keep
    total_pages = 0  # pages that the cache owns

    def __init__(self, page_size: int, is_hybrid: bool = False) -> None:
        """``is_hybrid``: there is a window group."""
        self.page_size = page_size
        self._handle = Handle()
        self._window_pages = _NO_PAGES if is_hybrid else None

    def match(self, ids: TokenIds, namespace: Hashable = None) -> Match:
        """Longest cached prefix of ``ids`` in whole pages; counts as a use of it.

        To have at least one token to compute, pass all ids but the last.
        """
        return Match(self._handle, _NO_PAGES, 0, self._window_pages)

    def peek(self, ids: TokenIds, namespace: Hashable = None) -> int:
        """Tokens that ``match`` would find; changes nothing (for ordering a queue)."""
        return 0

    def lock(self, handle: Handle) -> None:
        """Keeps the prefix from eviction; as many ``unlock`` as ``lock`` are needed."""

    def unlock(self, handle: Handle, is_window_locked: bool = True) -> None:
        """Undoes one ``lock``; ``is_window_locked`` is False after ``unlock_window``."""

    def unlock_window(self, handle: Handle) -> None:
        """Lets only the window of a locked prefix go (hybrid caches; else nothing)."""

    def insert(
        self,
        ids: TokenIds,
        pages: PageIds,
        namespace: Hashable = None,
        window_pages: PageIds | None = None,
    ) -> InsertResult:
        """Hands the whole pages of ``ids`` over to the cache.

        ``pages`` are the request's page table: what it matched and locked, then its own.
        """
        row = self._window_pages
        return InsertResult(self._handle, 0, 0, _NO_PAGES, _NO_PAGES, row, row)

    def find_tail(
        self, handle: Handle, ids: TokenIds, namespace: Hashable = None, at_least: int = 1
    ) -> Tail | None:
        """The page behind ``handle`` that starts with the most tokens of ``ids``, if one does.

        ids: less than a page of the tokens that follow the prefix of ``handle``. ``at_least``: so
        many of them.
        """
        return None

    def insert_tail(
        self,
        handle: Handle,
        ids: TokenIds,
        page: int,
        namespace: Hashable = None,
        window_page: int | None = None,
    ) -> bool:
        """Hands over a page that ``ids``, the tokens behind ``handle``, fill in part.

        False, and the page stays the caller's, if the cache has these tokens already.
        """
        return False

    def evict(self, num_pages: int) -> int:
        """Frees ``num_pages`` pages or as many as can be; returns how many."""
        return 0

    def evict_window(self, num_pages: int) -> int:
        """Frees ``num_pages`` pages of the window group or as many as can be; how many."""
        return 0

    def reset(self) -> None:
        """Forgets everything; InvariantError while something is locked."""

    @property
    def num_evictable(self) -> int:
        """Pages that ``evict`` can free."""
        return 0

    @property
    def num_window_evictable(self) -> int:
        """Window pages that ``evict_window`` can free."""
        return 0
