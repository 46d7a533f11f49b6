"""The books of the KV cache: which request holds which pages and slot, what the tree holds.

``take`` and ``give`` are the only doors. A request's pages are [those of the locked tree path]
followed by [its own]; ``insert`` moves whole computed pages from the second part to the first.
Models with sliding-window layers keep a second row of pages, whose entries are given back as soon
as the window has passed (``slide``).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixlm.base.record import Record
from radixlm.memory.check import Holding, check
from radixlm.memory.pages import NULL_PAGE, PageAllocator
from radixlm.memory.prefix.base import Match, PrefixCache
from radixlm.memory.prefix.window import WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array, SlotTable
from radixlm.step.plan import Int32Array, NewPages, PageUpdate

FULL, WINDOW = 0, 1


class WindowPages(Record):
    """The second page space: of models with window layers, or of those that keep states
    (``is_state``). A page of states is the state behind the page's last computed token, so of the
    pages of a step only two are needed: the last, and the last that is whole, which is a snapshot
    for the prefix cache."""

    pages: PageAllocator
    table: WindowTable
    is_state: bool = False


class KVCacheManager:
    """Pages and slots of one replica."""

    def __init__(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        cache: PrefixCache,
        page_size: int,
        window: WindowPages | None = None,
    ) -> None:
        self.pages, self.slots, self.cache, self.page_size = pages, slots, cache, page_size
        self.window = window
        self.rows = SlotTable(slots.num_total)
        self.updates: list[PageUpdate] = []  # for the next plan, as are these
        self.new_pages: NewPages | None = None
        self.hit_tokens = 0
        self.asked_tokens = 0

    @property
    def num_available(self) -> int:
        """Pages that can be had now, by eviction if need be."""
        return self.pages.num_free + self.cache.num_evictable

    @property
    def num_total_tokens(self) -> int:
        return self.pages.num_total * self.page_size

    @property
    def num_used_tokens(self) -> int:
        return (self.pages.num_total - self.num_available) * self.page_size

    @property
    def num_window_pages(self) -> int:
        """All that there are, 0 without window layers."""
        return self.window.pages.num_total if self.window is not None else 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match_limit(self, request: Request) -> int:
        """How many leading tokens may come from the tree: the last must be computed, and so must
        every place whose log-probability or hidden state is wanted."""
        wire = request.wire
        if wire.embeds is not None or wire.return_hidden_states:
            return 0
        if wire.pooling is not None and wire.pooling.is_whole:
            return 0
        limit = request.prefill_len - 1
        if wire.logprobs and wire.logprobs.prompt_from >= 0 and not request.num_output:
            limit = min(limit, max(wire.logprobs.prompt_from - 1, 0))
        return limit

    def admit(self, request: Request, spare_pages: int) -> bool:
        """Give a slot and the cached prefix, if the whole rest would leave ``spare_pages``."""
        limit = self.match_limit(request)
        found = self._match(request, min(limit, request.share_limit))
        self.cache.lock(found.handle)
        need = self.pages_for(request.prefill_len + 1) - len(found.pages)
        fits = need + spare_pages <= self.num_available and self._window_fits(request)
        slot = self.slots.alloc() if fits else None
        if slot is None:
            self.cache.unlock(found.handle)
            return False
        request.enter(self.rows, slot)
        request.handle, request.is_window_locked = found.handle, True
        request.add_pages(found.pages, found.window_pages, self.page_size)
        request.num_computed = request.num_committed = request.num_inserted = found.num_tokens
        request.num_cached = found.num_tokens
        self.hit_tokens += found.num_tokens
        self.asked_tokens += request.prefill_len
        if len(found.pages):
            self._note(request, 0, len(found.pages))
        return True

    def _match(self, request: Request, limit: int) -> Match:
        """The cached prefix; it does not end inside of places that see one another."""
        found = self.cache.match(request.ids[:limit], request.cache_key)
        for media in request.wire.media:
            for start, count in media.bidirectional_spans:
                if start < found.num_tokens < start + count:
                    return self._match(request, start)
        return found

    def _window_fits(self, request: Request) -> bool:
        """Whether window pages for the window and one page more can be had."""
        if self.window is None:
            return True
        need = self.pages_for(min(request.prefill_len + 1, self.window.table.window_tokens)) + 2
        need = max(need, self.run_pages(request))
        return need <= self.window.pages.num_free + self.cache.num_window_evictable

    def run_pages(self, request: Request) -> int:
        """Window pages that the longest run of places which see one another needs: it is computed
        in one step."""
        if self.window is None or self.window.is_state:
            return 0
        table = self.window.table
        runs = (run for media in request.wire.media for run in media.bidirectional_spans)
        return max((table.num_live_pages(*run) for run in runs), default=0)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Hold pages for the first ``num_tokens`` tokens; False if they cannot be had."""
        first = self._num_pages(request)
        need = self.pages_for(num_tokens) - first
        if need <= 0:
            return True
        if need > self.pages.num_free:
            self.cache.evict(need - self.pages.num_free)
        rows = self._alloc(first, need, num_tokens)
        if rows is None:
            return False
        request.add_pages(*rows, self.page_size)
        # the rows are fresh copies: nobody else writes to them
        self.updates.append(PageUpdate(FULL, request.slot, first, rows[0]))
        if rows[1] is not None:
            self.updates.append(PageUpdate(WINDOW, request.slot, first, rows[1]))
        return True

    def allocate_next_page(self, slots: Int64Array) -> bool:
        """Hold one page more for each of these rows, which have used theirs up; False if there are
        not enough for all."""
        if self.window is not None:
            requests = map(self.rows.request, slots.tolist())
            return all(self.allocate(request, request.num_allocated + 1) for request in requests)
        if len(slots) > self.pages.num_free:
            self.cache.evict(len(slots) - self.pages.num_free)
        pages = self.pages.alloc(len(slots))
        if pages is None:
            return False
        columns = self.rows.add_pages(slots, pages, self.page_size)
        self.new_pages = NewPages(slots, columns, pages)
        return True

    def _num_pages(self, request: Request) -> int:
        """Pages that it holds."""
        return request.num_allocated // self.page_size

    def _alloc(
        self, first: int, need: int, num_tokens: int
    ) -> tuple[Int32Array, Int32Array | None] | None:
        """Pages of both spaces for columns from ``first`` on, or none at all."""
        window = self.window
        if window is None:
            new = self.pages.alloc(need)
            return None if new is None else (new, None)
        columns = np.arange(first, first + need)
        if window.is_state:
            last, whole = (num_tokens - 1) // self.page_size, num_tokens // self.page_size - 1
            columns = columns[(columns == last) | (columns == whole)]
        short = len(columns) - window.pages.num_free
        if short > 0:
            self.cache.evict_window(short)
        if len(columns) > window.pages.num_free:
            return None
        new = self.pages.alloc(need)
        live = window.pages.alloc(len(columns)) if new is not None else None
        if new is None or live is None:
            return None
        row = np.full(need, NULL_PAGE, np.int32)
        row[columns - first] = live
        return new, row

    def _note(self, request: Request, first: int, end: int) -> None:
        """Tell the next plan of the request's pages [first, end)."""
        slot = request.slot
        self.updates.append(PageUpdate(FULL, slot, first, request.pages[first:end].copy()))
        if self.window is not None:
            row = request.window[first:end].copy()
            self.updates.append(PageUpdate(WINDOW, slot, first, row))

    def insert(self, request: Request) -> None:
        """Share the request's computed whole pages; its duplicates are swapped and freed."""
        if self.window is not None and self.window.is_state:
            self.free_out_of_window(request)  # only the last snapshot is shared
        whole = min(request.num_committed, request.share_limit) // self.page_size
        if request.wire.embeds is not None or whole * self.page_size <= request.num_inserted:
            return  # embeddings are not named by their token ids
        ids = request.ids[: whole * self.page_size]
        row = request.window[:whole].copy() if self.window is not None else None
        result = self.cache.insert(ids, request.pages[:whole].copy(), request.cache_key, row)
        shared = result.num_cached_pages
        self.cache.lock(result.handle)
        if request.handle is not None:
            self.cache.unlock(request.handle, request.is_window_locked)
        request.handle, request.num_inserted = result.handle, shared * self.page_size
        request.is_window_locked = True
        changed = result.pages != request.pages[:shared]
        request.pages[:shared] = result.pages
        if self.window is not None and result.window_pages is not None:
            changed |= result.window_pages != request.window[:shared]
            request.window[:shared] = result.window_pages
            if result.duplicate_window_pages is not None:
                self.window.pages.free(result.duplicate_window_pages)
        places = np.flatnonzero(changed)
        if len(places) and request.finish is None:
            self._note(request, int(places[0]), shared)
        self.pages.free(result.duplicate_pages)

    def free_out_of_window(self, request: Request) -> None:
        """Give back the window pages that no later token reads."""
        if self.window is None:
            return
        table = self.window.table
        start = request.num_inserted // self.page_size
        row = request.window[: self._num_pages(request)]
        self.window.pages.free(table.take_dead(row, request.num_committed, start))
        if request.is_window_locked and table.first_live_page(request.num_committed) >= start:
            if request.handle is not None:
                self.cache.unlock_window(request.handle)
            request.is_window_locked = False

    def free(self, request: Request) -> None:
        """Take back everything that the request holds."""
        own = slice(request.num_inserted // self.page_size, self._num_pages(request))
        if request.handle is not None:
            self.cache.unlock(request.handle, request.is_window_locked)
        self.pages.free(request.pages[own])
        if self.window is not None:
            row = request.window[own]
            self.window.pages.free(row[row != NULL_PAGE])
        self.slots.free(request.slot)
        request.leave()

    def holdings(self, running: Iterable[Request]) -> list[Holding]:
        """What each running request has of its own, and the prefix that it has locked."""
        return [self._holding(r) for r in running]

    def _holding(self, r: Request) -> Holding:
        own = slice(r.num_inserted // self.page_size, self._num_pages(r))
        row = r.window[own] if self.window is not None else None
        return Holding(r.slot, r.pages[own], r.handle, row, r.is_window_locked)

    def find_violations(self, running: Iterable[Request]) -> list[str]:
        """Every page has one owner, every slot one request; the differences in words."""
        window = self.window.pages if self.window is not None else None
        return check(self.pages, self.slots, self.cache, self.holdings(running), window)
