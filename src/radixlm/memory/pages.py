"""Who has which page of a KV pool: free, held by a request, or owned by the prefix cache.

    alloc: FREE -> HELD        adopt:   HELD -> CACHED   (the prefix cache takes a page over)
    free:  HELD -> FREE        release: CACHED -> FREE   (the prefix cache evicts it)

So a request that frees a page of the cache, twice, or not its own is caught at once.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from radixlm.base.errors import InvariantError

PageIds = NDArray[np.int32]

NULL_PAGE: Final = 0
FREE: Final = 0
HELD: Final = 1
CACHED: Final = 2
RESERVED: Final = 3
_STATE_NAMES: Final = ("free", "held by a request", "owned by the prefix cache", "reserved")


class PageAllocator:
    """Gives out pages ``1 .. num_pages - 1``; page 0 is the null page and never given.

    Every call is O(number of pages it names) and vectorised; a call that raises changes nothing.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise InvariantError(f"a pool of {num_pages} pages of {page_size} tokens")
        self.page_size = page_size
        self.num_pages = num_pages
        self._state = np.zeros(num_pages, np.uint8)
        self._state[NULL_PAGE] = RESERVED
        self._stamp = np.zeros(num_pages, np.int32)
        # A stack whose top is at the right; lowest ids on top, so that young pools stay dense.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that ``alloc`` can still give."""
        return self._num_free

    @property
    def num_total(self) -> int:
        """Pages that can be given out at all: ``num_pages - 1``."""
        return self.num_pages - 1

    def alloc(self, num_pages: int) -> PageIds | None:
        """``num_pages`` page ids as int32, or None (and nothing taken) if fewer are free."""
        if num_pages < 0:
            raise InvariantError(f"{num_pages} pages asked for")
        if num_pages > self._num_free:
            return None
        start = self._num_free - num_pages
        if num_pages == 1:  # a decoding request: an index array would cost twice the rest
            page = self._stack[start : start + 1].copy()
            self._num_free = start
            self._state[page.item()] = HELD
            return page
        pages = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._state[pages] = HELD
        return pages

    def free(self, pages: ArrayLike) -> None:
        """Takes back pages that a request held; InvariantError if one is not held."""
        self._push(self._checked(pages, HELD))

    def adopt(self, pages: ArrayLike) -> None:
        """The prefix cache takes over pages that a request held."""
        self._state[self._checked(pages, HELD)] = CACHED

    def release(self, pages: ArrayLike) -> None:
        """Takes back pages that the prefix cache owned."""
        self._push(self._checked(pages, CACHED))

    def pages_in(self, state: int) -> PageIds:
        """Ids of all pages in ``state`` (FREE, HELD or CACHED), ascending. O(num_pages)."""
        return np.flatnonzero(self._state == state).astype(np.int32)

    def rebuild(self, held: PageIds, cached: PageIds) -> None:
        """Makes the free list anew from who owns what: every page in neither array is free."""
        self._state[:] = FREE
        self._state[held] = HELD
        self._state[cached] = CACHED
        self._state[NULL_PAGE] = RESERVED
        free = self.pages_in(FREE)
        self._num_free = len(free)
        self._stack[: len(free)] = free[::-1]

    def audit(self) -> list[str]:
        """Where the free list and the states disagree, with both numbers."""
        listed = np.sort(self._stack[: self._num_free])
        free = self.pages_in(FREE)
        if np.array_equal(listed, free):
            return []
        return [f"{len(listed)} pages in the free list, {len(free)} are free"]

    def _push(self, index: NDArray[np.intp]) -> None:
        """Puts pages on the free stack, the first of them on top."""
        self._state[index] = FREE
        self._stack[self._num_free : self._num_free + len(index)] = index[::-1]
        self._num_free += len(index)

    def _checked(self, pages: ArrayLike, state: int) -> NDArray[np.intp]:
        """``pages`` as an index, after a check that each is in ``state`` and named once."""
        ids = np.asarray(pages, np.int32)
        index = ids.astype(np.intp)  # once here, or numpy converts again for each look-up
        if len(ids) == 0:
            return index
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_pages:
            raise InvariantError(
                f"page ids {int(ids.min())} .. {int(ids.max())} in a pool of {self.num_pages}"
            )
        is_wrong = self._state[index] != state
        if is_wrong.any():
            page = int(ids[is_wrong.argmax()])
            raise InvariantError(
                f"page {page} is {_STATE_NAMES[self._state[page]]}, expected {_STATE_NAMES[state]} "
                f"({int(is_wrong.sum())} of {len(ids)} pages)"
            )
        if self._is_any_twice(index):
            page = int(np.bincount(index).argmax())
            raise InvariantError(f"page {page} is named twice in one call")
        return index

    def _is_any_twice(self, index: NDArray[np.intp]) -> bool:
        """Whether a page is named twice: by marking where many are named, else by stamping."""
        if len(index) > self.num_pages // 8:
            is_named = np.zeros(self.num_pages, np.bool_)
            is_named[index] = True
            return int(np.count_nonzero(is_named)) < len(index)
        # Of a page that is named twice only the last stamp survives.
        order = np.arange(len(index), dtype=np.int32)
        self._stamp[index] = order
        return bool((self._stamp[index] != order).any())
