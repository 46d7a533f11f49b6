"""The books of the KV cache: which request holds which pages and slot, what the tree holds.

``take`` and ``give`` are the only doors. A request's pages are [those of the locked tree path]
followed by [its own]; ``insert`` moves whole computed pages from the second part to the first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixlm.memory.check import Holding, check
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.scheduler.request import Request
from radixlm.step.plan import PageUpdate


class KvLedger:
    """Pages and slots of one replica."""

    def __init__(
        self, pages: PageAllocator, slots: SlotAllocator, cache: PrefixCache, page_size: int
    ) -> None:
        self.pages, self.slots, self.cache, self.page_size = pages, slots, cache, page_size
        self.updates: list[PageUpdate] = []  # for the next plan
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

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match_limit(self, request: Request) -> int:
        """How many leading tokens may come from the tree: the last must be computed, and so must
        every place whose log-probability or hidden state is wanted."""
        wire = request.wire
        if wire.embeds is not None or wire.return_hidden_states or wire.pooling:
            return 0
        limit = request.base - 1
        if wire.logprobs and wire.logprobs.prompt_from >= 0 and not request.num_output:
            limit = min(limit, max(wire.logprobs.prompt_from - 1, 0))
        return limit

    def admit(self, request: Request, spare_pages: int) -> bool:
        """Give a slot and the cached prefix, if the whole rest would leave ``spare_pages``."""
        limit = self.match_limit(request)
        found = self.cache.match(request.ids[: min(limit, request.share_limit)], request.key)
        self.cache.lock(found.handle)
        need = self.pages_for(request.base + 1) - len(found.pages)
        slot = self.slots.alloc() if need + spare_pages <= self.num_available else None
        if slot is None:
            self.cache.unlock(found.handle)
            return False
        request.slot, request.handle = slot, found.handle
        request.add_pages(found.pages)
        request.computed = request.done = request.inserted = found.num_tokens
        request.num_cached = found.num_tokens
        self.hit_tokens += found.num_tokens
        self.asked_tokens += request.base
        if len(found.pages):
            self.updates.append(PageUpdate(0, slot, 0, found.pages))
        return True

    def take(self, request: Request, num_tokens: int) -> bool:
        """Hold pages for the first ``num_tokens`` tokens; False if they cannot be had."""
        need = self.pages_for(num_tokens) - request.num_pages
        if need <= 0:
            return True
        if need > self.pages.num_free:
            self.cache.evict(need - self.pages.num_free)
        new = self.pages.alloc(need)
        if new is None:
            return False
        self.updates.append(PageUpdate(0, request.slot, request.num_pages, new))
        request.add_pages(new)
        return True

    def insert(self, request: Request) -> None:
        """Share the request's computed whole pages; its duplicates are swapped and freed."""
        whole = min(request.done, request.share_limit) // self.page_size
        if self.match_limit(request) == 0 or whole * self.page_size <= request.inserted:
            return
        ids = request.ids[: whole * self.page_size]
        result = self.cache.insert(ids, request.pages[:whole].copy(), request.key)
        shared = result.num_cached_pages
        self.cache.lock(result.handle)
        if request.handle is not None:
            self.cache.unlock(request.handle)
        request.handle, request.inserted = result.handle, shared * self.page_size
        changed = np.flatnonzero(result.pages != request.pages[:shared])
        if len(changed):
            request.pages[:shared] = result.pages
            first = int(changed[0])
            if request.finish is None:
                update = PageUpdate(0, request.slot, first, result.pages[first:].copy())
                self.updates.append(update)
        self.pages.free(result.duplicate_pages)

    def give(self, request: Request) -> None:
        """Take back everything that the request holds."""
        shared = request.inserted // self.page_size
        if request.handle is not None:
            self.cache.unlock(request.handle)
        self.pages.free(request.pages[shared : request.num_pages])
        self.slots.free(request.slot)
        request.handle, request.num_pages, request.inserted = None, 0, 0

    def holdings(self, running: Iterable[Request]) -> list[Holding]:
        """What each running request has of its own, and the prefix that it has locked."""
        return [
            Holding(r.slot, r.pages[r.inserted // self.page_size : r.num_pages], r.handle)
            for r in running
        ]

    def breaches(self, running: Iterable[Request]) -> list[str]:
        """Every page has one owner, every slot one request; the differences in words."""
        return check(self.pages, self.slots, self.cache, self.holdings(running))
