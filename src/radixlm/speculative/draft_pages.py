"""PathPages: pages that a step with drafts takes besides those of its requests.

A further path of drafts shares the request's pages up to the one that its first token is in. Of
that page it has a copy, and pages of its own behind it. The pages of the path that was right change
places with the request's; then those of all paths are freed.

A recurrent state that refused drafts would spoil is copied before the step, and put back after it.
"""

from __future__ import annotations

import numpy as np

from radixlm.scheduler.draft_pages import DraftPages, Fork
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.page_changes import FULL, WINDOW
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import Int32Array, PageCopy, PageUpdate

_ROOM = 8  # times the pages of a path must be had before the prefix cache gives some up for it


class PathPages(DraftPages):
    """Of one KVCacheManager, which has them from now on."""

    def __init__(self, kv_manager: KVCacheManager) -> None:
        super().__init__()
        self._kv, self._page_size = kv_manager, kv_manager.page_size
        window, self._changes = kv_manager.window, kv_manager.changes
        self._has_states = window is not None and window.is_state
        self._spaces = (kv_manager.pages,) if window is None else (kv_manager.pages, window.pages)
        kv_manager.drafts = self

    # ---- further paths ---------------------------------------------------------------------

    def fork(self, request: Request, page_row: int, start: int, end: int) -> bool:
        """Give another path of drafts, at [start, end) of the request, pages in a row of the page
        tables; False, and no change, if they would have to come from others."""
        first = start // self._page_size
        count, num_free = -(-end // self._page_size) - first, self._spaces[FULL].num_free
        # what is evicted for a path is free again after the step, and serves the next one
        if count > num_free and count * _ROOM <= self._kv.num_available:
            self._kv.make_room(count)
        taken: list[Int32Array] = []
        for space in self._spaces:
            pages = space.alloc(count)
            if pages is None:
                for allocator, some in zip(self._spaces, taken, strict=False):
                    allocator.free(some)
                return False
            taken.append(pages)
        self.forks[page_row] = Fork(first, tuple(taken))
        for group, (row, pages) in enumerate(zip(self._rows(request), taken, strict=True)):
            whole = np.concatenate((row[:first], pages)).astype(np.int32)
            self._changes.updates.append(PageUpdate(group, page_row, 0, whole))
            if start % self._page_size:
                copy = PageCopy(group, request.slot, int(row[first]), int(pages[0]))
                self._changes.copies.append(copy)
        return True

    def adopt(self, request: Request, page_row: int, num_tokens: int) -> None:
        """A path of drafts was right: the request goes on in its pages, up to ``num_tokens``."""
        first, taken = self.forks[page_row]
        count = -(-num_tokens // self._page_size) - first
        for row, pages in zip(self._rows(request), taken, strict=True):
            own = row[first : first + count]
            own[:], pages[:count] = pages[:count].copy(), own.copy()
        self._changes.add(request, first, first + count)

    def _rows(self, request: Request) -> tuple[Int32Array, ...]:
        return (request.pages, request.window)[: len(self._spaces)]

    def free_forks(self) -> None:
        """The step with further paths of drafts is over."""
        for fork in self.forks.values():
            for space, pages in zip(self._spaces, fork.pages, strict=True):
                space.free(pages)
        self.forks.clear()

    # ---- states ----------------------------------------------------------------------------

    def save_state(self, request: Request, start: int) -> bool:
        """Have the next step save the state after ``start`` tokens, where it would write over it;
        False without a page for the copy. Other models need none."""
        if not self._has_states or start % self._page_size == 0:
            return True
        page = self._kv.allocate_state()
        if page is None:
            return False
        source = int(request.window[start // self._page_size])
        self._changes.copies.append(PageCopy(WINDOW, request.slot, source, int(page[0])))
        self.saved[request.slot] = page
        return True

    def restore_state(self, request: Request, start: int) -> None:
        """Put the state after ``start`` tokens back, where the step has written over it."""
        saved, column = self.saved.pop(request.slot, None), start // self._page_size
        if saved is not None:
            self._spaces[WINDOW].free(request.window[column : column + 1].copy())
            request.window[column] = saved[0]
            self._changes.updates.append(PageUpdate(WINDOW, request.slot, column, saved))

    def free_saved(self, slots: Int64Array) -> None:
        """Free the saved states of these slots, whose step can be undone no more."""
        for slot in slots.tolist() if self.saved else ():
            page = self.saved.pop(slot, None)
            if page is not None:
                self._spaces[WINDOW].free(page)
