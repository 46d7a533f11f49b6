"""KVCacheManager: which request holds which pages and slot, and what the prefix cache holds.

Pages and slots change owner only in ``admit``, ``allocate``, ``insert``, ``free_out_of_window``,
``trim`` and ``free``, and in ``drafts``. A request's pages are first those of the cached prefix
that it has locked, then its own; ``insert`` moves whole computed pages from the second part to the
first. Models with sliding-window layers or recurrent states have a second page table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.memory.pages import NULL_PAGE, PageAllocator
from radixlm.memory.prefix.base import InsertResult, Match, PrefixCache, Tail
from radixlm.memory.prefix.window import WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.scheduler.draft_pages import DraftPages
from radixlm.scheduler.page_changes import WINDOW, PageChanges
from radixlm.scheduler.request import Request
from radixlm.scheduler.reservations import Reservations
from radixlm.scheduler.slot_table import Int64Array, SlotTable
from radixlm.step.plan import Int32Array, NewPages, PageCopy, PageUpdate


class WindowPages(Record):
    """The second page space, of sliding-window layers or of recurrent states (``is_state``).

    A page of states holds the state after the page's last computed token. A step needs two at
    most: the last page, and the last whole one, which is a snapshot for the prefix cache."""

    pages: PageAllocator
    table: WindowTable
    is_state: bool = False


class Tails(Protocol):
    """Hits that go on behind whole pages: parts of pages, which are copied."""

    def find(self, request: Request, match: Match, limit: int) -> Tail | None:
        """The page that goes on longest behind the match, up to ``limit`` tokens."""

    def copy(self, request: Request, tail: Tail) -> None:
        """Give the request a page of its own with a copy of the tail."""

    def insert(self, request: Request) -> bool:
        """Hand the page behind the inserted ones over to the prefix cache; whether it took it."""


class KVCacheManager:
    """Pages and slots of one engine.

    ``requests[slot]`` is the request in the slot; ``changes`` collects what the next plan changes
    of the page tables and copies; ``drafts`` has further pages of steps with drafts."""

    def __init__(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        prefix_cache: PrefixCache,
        page_size: int,
        window: WindowPages | None = None,
    ) -> None:
        self.pages, self.slots, self.prefix_cache = pages, slots, prefix_cache
        self.page_size, self.window = page_size, window
        self.table = SlotTable(slots.num_total)
        self.requests: list[Request | None] = [None] * slots.num_total
        self.tails: Tails | None = None  # hits on parts of pages
        self.changes = PageChanges(window is not None)
        self.reservations = Reservations()
        self.drafts = DraftPages()
        # told of what ``insert`` has put into the prefix cache
        self.on_insert: Callable[[Request, InsertResult], None] | None = None
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0

    @property
    def parts(self) -> Sequence[KVCacheManager]:
        """The managers with pages of their own: this one, unless there are attention groups."""
        return (self,)

    def shares_pages(self, first: Request, second: Request) -> bool:
        """Whether pages that one request frees can be given to the other."""
        return True

    def take_changes(self) -> tuple[list[PageUpdate], NewPages | None, list[PageCopy]]:
        """What the next plan changes of the page tables, and what it copies."""
        return self.changes.take()

    def drop_changes(self, slot: int) -> None:
        """Of a request that is released."""
        self.changes.drop(slot)

    def drafts_of(self, request: Request) -> DraftPages:
        """The further pages of the request's drafts."""
        return self.drafts

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompts' tokens that were found in the prefix cache."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens that the prefix cache has given up since the start."""
        return self.prefix_cache.num_evicted * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that can be allocated, counting those that the prefix cache can evict."""
        return self.pages.num_free + self.reservations.num_spare + self.prefix_cache.num_evictable

    @property
    def num_total_tokens(self) -> int:
        return self.pages.num_total * self.page_size

    @property
    def num_used_tokens(self) -> int:
        return (self.pages.num_total - self.num_available) * self.page_size

    @property
    def num_window_pages(self) -> int:
        """All pages of the second space, 0 without one."""
        return self.window.pages.num_total if self.window is not None else 0

    def request_in(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"no request has slot {slot}"
        return request

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def make_room(self, num_pages: int) -> None:
        """Have so many pages free, if that can be: spare ones go first."""
        missing = num_pages - self.pages.num_free
        missing -= self.reservations.free_spare(missing)
        if missing > 0:
            self.prefix_cache.evict(missing)

    def match_limit(self, request: Request) -> int:
        """How many leading tokens may come from the prefix cache. The last token must be computed,
        and so must every token whose log-probability, hidden state or experts are wanted."""
        wire = request.wire
        if wire.embeds is not None or wire.wants_rows:
            return 0
        if wire.pooling is not None and wire.pooling.is_whole:
            return 0
        limit = request.prefill_len - 1
        if wire.logprobs and wire.logprobs.prompt_from >= 0 and not request.num_output:
            limit = min(limit, max(wire.logprobs.prompt_from - 1, 0))
        return limit

    def admit(self, request: Request, spare_pages: int) -> bool:
        """Assign a slot and the cached prefix, if ``spare_pages`` would be left after the request's
        whole prefill."""
        limit = self.match_limit(request)
        limit = min(limit, request.share_limit)
        match = self._match(request, limit)
        tail = None if self.tails is None else self.tails.find(request, match, limit)
        self.prefix_cache.lock(match.handle)
        need = self.pages_for(request.prefill_len + 1) - len(match.pages)
        fits = need + spare_pages <= self.num_available and self._window_fits(request, match)
        slot = self.slots.alloc() if fits else None
        if slot is None:
            self.prefix_cache.unlock(match.handle)
            return False
        self.requests[slot] = request
        request.assign_slot(self.table, slot)
        request.handle, request.is_window_locked = match.handle, True
        request.add_pages(match.pages, match.window_pages, self.page_size)
        request.num_computed = request.num_committed = request.num_inserted = match.num_tokens
        if len(match.pages):
            self.changes.add(request, 0, len(match.pages))
        if self.tails is not None and tail is not None:
            self.tails.copy(request, tail)
        request.num_cached = request.num_computed
        self.num_hit_tokens += request.num_cached
        self.num_queried_tokens += request.prefill_len
        return True

    def _match(self, request: Request, limit: int) -> Match:
        """The cached prefix; it does not end inside a span of tokens that attend to each other."""
        match = self.prefix_cache.match(request.ids[:limit], request.namespace)
        for media in request.wire.media:
            for start, count in media.bidirectional_spans:
                if start < match.num_tokens < start + count:
                    return self._match(request, start)
        return match

    def _window_fits(self, request: Request, match: Match) -> bool:
        """Whether window pages for the window and one page more can be allocated, or all that the
        cached prefix, which is locked, leaves."""
        if self.window is None or match.window_pages is None:
            return True
        pool, num_locked = self.window.pages, int(np.count_nonzero(match.window_pages))
        need = self.pages_for(min(request.prefill_len + 1, self.window.table.window_tokens)) + 2
        need = min(max(need, self.max_span_pages(request)), pool.num_total - num_locked)
        return need <= pool.num_free + self.prefix_cache.num_window_evictable

    def max_span_pages(self, request: Request) -> int:
        """Window pages for the longest span of tokens that attend to each other: such a span is
        computed in one step."""
        if self.window is None or self.window.is_state:
            return 0
        table = self.window.table
        spans = (span for media in request.wire.media for span in media.bidirectional_spans)
        return max((table.num_live_pages(*span) for span in spans), default=0)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages up to the first ``num_tokens`` tokens; False, and no page of tokens more,
        if there are not enough."""
        first = self._num_pages(request)
        need = self.pages_for(num_tokens) - first
        if not self._add_states(request, num_tokens):
            return False
        if need <= 0:
            return True
        if need > self.pages.num_free:
            self.make_room(need)
        rows = self._alloc(first, need, num_tokens)
        if rows is None:
            return False
        request.add_pages(*rows, self.page_size)
        self.changes.add_rows(request.slot, first, *rows)
        return True

    def needs_page(self, slots: Int64Array) -> NDArray[np.bool_]:
        """Which of these slots have no page for their next token, or for the state after it: rows
        that hold pages ahead for drafts hold few states there."""
        table = self.table
        position = table.num_computed[slots]
        is_full: NDArray[np.bool_] = position >= table.num_allocated[slots]
        if self.window is not None and self.window.is_state:
            columns = np.minimum(position // self.page_size, table.window.shape[1] - 1)
            is_full |= table.window[slots, columns] == NULL_PAGE
        return is_full

    def allocate_next_page(self, slots: Int64Array) -> bool:
        """Allocate what ``needs_page`` tells of these slots; False if that is not there for all."""
        if self.window is not None:
            requests = map(self.request_in, slots.tolist())
            return all(self.allocate(request, request.num_computed + 1) for request in requests)
        if len(slots) > self.pages.num_free:
            self.make_room(len(slots))
        pages = self.pages.alloc(len(slots))
        if pages is None:
            return False
        columns = self.table.add_pages(slots, pages, self.page_size)
        self.changes.new_pages = NewPages(slots, columns, pages)
        return True

    def trim(self, slots: Int64Array) -> None:
        """Free the pages that requests which decode hold for more than their next token: refused
        drafts were there."""
        for slot in slots.tolist():
            request = self.request_in(slot)
            if not request.inflight:
                self._trim_to(request, request.num_computed + 1)

    def _trim_to(self, request: Request, num_tokens: int) -> None:
        keep, have = self.pages_for(num_tokens), self._num_pages(request)
        if keep >= have:
            return
        self.pages.free(request.pages[keep:have].copy())
        if self.window is not None:
            row = request.window[keep:have]
            self.window.pages.free(row[row != NULL_PAGE])
            row[:] = NULL_PAGE
        request.num_allocated = keep * self.page_size

    def _add_states(self, request: Request, num_tokens: int) -> bool:
        """Allocate the pages of states that a step up to ``num_tokens`` writes, where the row has
        pages already; False if there are not enough."""
        window, size = self.window, self.page_size
        if window is None or not window.is_state:
            return True
        for end in (num_tokens // size * size, num_tokens):
            column = (end - 1) // size
            is_there = request.num_computed < end <= request.num_allocated
            if not is_there or request.window[column] != NULL_PAGE:
                continue
            page = self.allocate_state()
            if page is None:
                return False
            request.window[column] = page[0]
            self.changes.updates.append(PageUpdate(WINDOW, request.slot, column, page))
        return True

    def allocate_state(self) -> Int32Array | None:
        """A page for a state, if need be from the prefix cache's snapshots; None without one."""
        assert self.window is not None
        if not self.window.pages.num_free:
            self.prefix_cache.evict_window(1)
        return self.window.pages.alloc(1)

    def restore_state(self, request: Request, start: int) -> None:
        """Undo a step that has taken the state beyond the known tokens: ``start`` tokens count as
        computed, as before it."""
        self.drafts.restore_state(request, start)
        self._trim_to(request, start)
        request.num_computed = request.num_committed = start

    def _num_pages(self, request: Request) -> int:
        return request.num_allocated // self.page_size

    def _alloc(
        self, first: int, need: int, num_tokens: int
    ) -> tuple[Int32Array, Int32Array | None] | None:
        """Pages of both spaces for the columns from ``first`` on, or None and no change."""
        window = self.window
        if window is None:
            pages = self.pages.alloc(need)
            return None if pages is None else (pages, None)
        columns = np.arange(first, first + need)
        if window.is_state:
            last, whole = (num_tokens - 1) // self.page_size, num_tokens // self.page_size - 1
            columns = columns[(columns == last) | (columns == whole)]
        num_missing = len(columns) - window.pages.num_free
        if num_missing > 0:
            self.prefix_cache.evict_window(num_missing)
        if len(columns) > window.pages.num_free:
            return None
        pages = self.pages.alloc(need)
        window_pages = window.pages.alloc(len(columns)) if pages is not None else None
        if pages is None or window_pages is None:
            return None
        row = np.full(need, NULL_PAGE, np.int32)
        row[columns - first] = window_pages
        return pages, row

    def insert(self, request: Request) -> None:
        """Put the request's whole committed pages into the prefix cache. Where the cache had a page
        already, the request uses the cache's page and its own is freed."""
        if self.window is not None and self.window.is_state:
            self.free_out_of_window(request)  # only the last snapshot is shared
        whole = min(request.num_committed, request.share_limit) // self.page_size
        if request.wire.embeds is not None or whole * self.page_size <= request.num_inserted:
            return  # token ids say nothing about input embeddings
        ids = request.ids[: whole * self.page_size]
        row = None
        if self.window is not None:
            row = request.window[:whole].copy()
            first = self.window.table.first_live_page(whole * self.page_size)
            if not row[first:].all():
                return  # beyond its share limit, the request has given up what the prefix ends with
        result = self.prefix_cache.insert(ids, request.pages[:whole].copy(), request.namespace, row)
        shared = result.num_cached_pages
        self.prefix_cache.lock(result.handle)
        if request.handle is not None:
            self.prefix_cache.unlock(request.handle, request.is_window_locked)
        request.handle, request.num_inserted = result.handle, shared * self.page_size
        request.is_window_locked = True
        is_changed = result.pages != request.pages[:shared]
        request.pages[:shared] = result.pages
        if self.window is not None and result.window_pages is not None:
            is_changed |= result.window_pages != request.window[:shared]
            request.window[:shared] = result.window_pages
            if result.duplicate_window_pages is not None:
                self.window.pages.free(result.duplicate_window_pages)
        changed = np.flatnonzero(is_changed)
        if len(changed) and request.finish is None:
            self.changes.add(request, int(changed[0]), shared)
        self.pages.free(result.duplicate_pages)
        if self.on_insert is not None:
            self.on_insert(request, result)

    def free_out_of_window(self, request: Request) -> None:
        """Free the window pages that no later token reads."""
        if self.window is None:
            return
        table = self.window.table
        start = request.num_inserted // self.page_size
        row = request.window[: self._num_pages(request)]
        self.window.pages.free(table.take_dead(row, request.num_committed, start))
        if request.is_window_locked and table.first_live_page(request.num_committed) >= start:
            if request.handle is not None:
                self.prefix_cache.unlock_window(request.handle)
            request.is_window_locked = False

    def free(self, request: Request) -> None:
        """Free what the request holds: its lock, its slot, its own pages; the prefix cache may take
        the last one, which is filled in part."""
        first = request.num_inserted // self.page_size
        first += self.tails is not None and self.tails.insert(request)
        own = slice(first, self._num_pages(request))
        if request.handle is not None:
            self.prefix_cache.unlock(request.handle, request.is_window_locked)
        self.pages.free(request.pages[own])
        if self.window is not None:
            row = request.window[own]
            self.window.pages.free(row[row != NULL_PAGE])
            self.drafts.free_saved(np.array([request.slot]))
        self.slots.free(request.slot)
        self.requests[request.slot] = None
        request.release_slot()
