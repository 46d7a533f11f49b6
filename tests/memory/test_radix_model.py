"""The radix tree against a plain dict of prefixes: exact hits, pages and eviction, step by step.

The model keeps one entry a page: (extra key, tokens up to the page's end) -> page, time, hits.
It evicts by looking at all entries, one page at a time.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixlm.memory.pages import CACHED, PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.self_check.audit import audit
from radixlm.tiers.ahead import next_evicted

NUM_PAGES = 40


@dataclass
class Entry:
    page: int
    time: int
    num_hits: int = 0


class Model:
    def __init__(self, page_size, eviction):
        self.page_size, self.eviction = page_size, eviction
        self.entries, self.locks, self.time = {}, Counter(), 0

    def prefixes(self, ids, key):
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [(key, tuple(ids[:end])) for end in ends]

    def hit(self, ids, key):
        found = []
        for prefix in self.prefixes(ids, key):
            if prefix not in self.entries:
                break
            found.append(prefix)
        return found

    def match(self, ids, key):
        self.time += 1
        found = self.hit(ids, key)
        for prefix in found:
            self.entries[prefix].time = self.time
            self.entries[prefix].num_hits += 1
        return found

    def insert(self, ids, pages, key):
        """Insert; returns the caller's duplicates."""
        self.time += 1
        duplicates = []
        for prefix, page in zip(self.prefixes(ids, key), pages, strict=False):
            entry = self.entries.setdefault(prefix, Entry(page, 0))
            entry.time = self.time
            if entry.page != page:
                duplicates.append(page)
        return duplicates

    def is_locked(self, prefix):
        key, tokens = prefix
        return any(
            n and other == key and locked[: len(tokens)] == tokens
            for (other, locked), n in self.locks.items()
        )

    def rank(self, prefix):
        entry = self.entries[prefix]
        return (entry.num_hits if self.eviction == "lfu" else 0, entry.time)

    def evict(self, num_pages):
        freed = []
        while len(freed) < num_pages:
            inner = {(key, tokens[: -self.page_size]) for key, tokens in self.entries}
            leaves = [p for p in self.entries if p not in inner and not self.is_locked(p)]
            if not leaves:
                break
            freed.append(self.entries.pop(min(leaves, key=self.rank)).page)
        return freed


PROMPTS = {
    "blocks": st.integers(0, 7).flatmap(
        lambda n: st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=n, max_size=n)
    ),
    "num_rest": st.integers(0, 3),
    "key": st.sampled_from([None, "a", ""]),
}


class RadixMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 4, 16]), eviction=st.sampled_from(["lru", "lfu"]))
    def start(self, page_size, eviction):
        self.pool = PageAllocator(NUM_PAGES, page_size)
        self.cache = RadixCache(self.pool, page_size, eviction)
        self.model = Model(page_size, eviction)
        self.locked = []

    def ids(self, blocks, num_rest):
        """Each block is a page of zeros that ends in the block's symbol; then a partial page."""
        size = self.pool.page_size
        pages = [[0] * (size - 1) + [block] for block in blocks]
        return [token for page in pages for token in page] + [0] * min(num_rest, size - 1)

    @rule(**PROMPTS)
    def match(self, blocks, num_rest, key):
        ids = self.ids(blocks, num_rest)
        num_peeked = self.cache.peek(np.array(ids, np.int32), key)
        match = self.cache.match(np.array(ids, np.int32), key)
        found = self.model.match(ids, key)
        assert match.num_tokens == num_peeked == len(found) * self.pool.page_size
        assert match.pages.tolist() == [self.model.entries[p].page for p in found]

    @rule(**PROMPTS, num_extra=st.integers(0, 1), is_locked=st.booleans())
    def run_request(self, blocks, num_rest, key, num_extra, is_locked):
        """What a request does: match, lock, compute the rest, insert, free its own pages."""
        ids = self.ids(blocks, num_rest)
        array = np.array(ids, np.int32)
        match, found = self.cache.match(array, key), self.model.match(ids, key)
        self.cache.lock(match.handle)
        num_whole = len(ids) // self.pool.page_size
        fresh = self.pool.alloc(num_whole - len(match.pages) + num_extra)
        if fresh is not None:
            table = np.concatenate([match.pages, fresh])
            result = self.cache.insert(array, table, key)
            assert result.num_shared_pages == len(found)
            assert result.duplicate_pages.tolist() == self.model.insert(ids, table.tolist(), key)
            assert result.num_cached_pages == num_whole
            assert result.pages.tolist() == table[:num_whole].tolist()
            self.pool.free(table[num_whole:])
            if is_locked:
                self.lock(result.handle, (key, tuple(ids[: num_whole * self.pool.page_size])))
        self.cache.unlock(match.handle)

    @rule(**PROMPTS)
    def insert_without_match(self, blocks, num_rest, key):
        """A request that computed what another one cached meanwhile."""
        ids = self.ids(blocks, num_rest)
        pages = self.pool.alloc(len(blocks))
        if pages is None:
            return
        result = self.cache.insert(np.array(ids, np.int32), pages, key)
        duplicates = self.model.insert(ids, pages.tolist(), key)
        assert result.duplicate_pages.tolist() == duplicates
        assert len(duplicates) == result.num_shared_pages
        self.pool.free(result.duplicate_pages)
        prefixes = self.model.prefixes(ids, key)
        assert result.pages.tolist() == [self.model.entries[p].page for p in prefixes]

    def lock(self, handle, prefix):
        if prefix[1]:
            self.cache.lock(handle)
            self.model.locks[prefix] += 1
            self.locked.append((handle, prefix))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        handle, prefix = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(handle)
        self.model.locks[prefix] -= 1

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages):
        num_evictable = self.cache.num_evictable
        free = set(self.pool.pages_in(0).tolist())
        prefixes = next_evicted(self.cache, num_pages)
        for prefix in prefixes:
            path = self.model.prefixes(prefix.ids.tolist(), prefix.namespace)
            assert [self.model.entries[p].page for p in path] == prefix.pages.tolist()
        num_freed = self.cache.evict(num_pages)
        freed = self.model.evict(num_pages)
        assert num_freed == len(freed) == min(num_pages, num_evictable)
        assert set(self.pool.pages_in(0).tolist()) - free == set(freed)
        assert set(freed) <= {page for prefix in prefixes for page in prefix.pages.tolist()}

    @precondition(lambda self: not self.locked)
    @rule()
    def reset(self):
        self.cache.reset()
        self.model.entries.clear()
        assert self.pool.num_free == self.pool.num_total

    @invariant()
    def accounting_balances(self):
        if not hasattr(self, "cache"):
            return
        found = audit(self.cache, [(handle, True) for handle, _ in self.locked])
        assert found.violations == [] and self.pool.audit() == []
        pages = sorted(entry.page for entry in self.model.entries.values())
        assert sorted(found.pages.tolist()) == pages == self.pool.pages_in(CACHED).tolist()
        assert self.cache.total_pages == len(pages)
        num_locked = sum(self.model.is_locked(prefix) for prefix in self.model.entries)
        assert self.cache.num_locked == num_locked
        assert self.cache.num_evictable == len(pages) - num_locked


TestRadixAgainstModel = RadixMachine.TestCase
TestRadixAgainstModel.settings = settings(
    max_examples=50, stateful_step_count=35, derandomize=True, deadline=None
)
