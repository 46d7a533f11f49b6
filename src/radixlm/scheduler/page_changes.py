"""PageChanges: what the next plan changes of the page tables, and which pages it copies."""

from __future__ import annotations

from radixlm.scheduler.request import Request
from radixlm.step.plan import Int32Array, NewPages, PageCopy, PageUpdate

FULL, WINDOW = 0, 1


class PageChanges:
    """Of one KVCacheManager. ``has_window``: there is a second page table."""

    def __init__(self, has_window: bool) -> None:
        self._has_window = has_window
        self.updates: list[PageUpdate] = []
        self.new_pages: NewPages | None = None
        self.copies: list[PageCopy] = []

    def take(self) -> tuple[list[PageUpdate], NewPages | None, list[PageCopy]]:
        """All changes since the last call."""
        changes = self.updates, self.new_pages, self.copies
        self.updates, self.new_pages, self.copies = [], None, []
        return changes

    def drop(self, slot: int) -> None:
        """Of a request that is released."""
        self.updates = [u for u in self.updates if u.slot != slot]
        self.copies = [c for c in self.copies if c.slot != slot]

    def copies_any(self, group: int, pages: Int32Array) -> bool:
        """Whether the next plan copies one of these pages, which may be free by now: it is read
        before the step writes, but nobody else may write there."""
        return any(c.group == group and c.source in pages for c in self.copies)

    def add(self, request: Request, first: int, end: int) -> None:
        """The request's pages [first, end)."""
        self.add_rows(request.slot, first, request.pages[first:end].copy(),
                      request.window[first:end].copy() if self._has_window else None)  # fmt: skip

    def add_rows(
        self, slot: int, first: int, pages: Int32Array, window_pages: Int32Array | None
    ) -> None:
        """Pages from column ``first`` on, which nobody else writes to."""
        self.updates.append(PageUpdate(FULL, slot, first, pages))
        if window_pages is not None:
            self.updates.append(PageUpdate(WINDOW, slot, first, window_pages))
