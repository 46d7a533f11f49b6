"""Random requests with window layers on pools whose contents are simulated.

Each full page records the tokens it was written for. So a page that is freed too early, given
out twice or passed on with wrong tokens is found when it is read.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.memory.two_pools import TwoPools

from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import Handle
from radixlm.memory.prefix.node import page_ids
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup
from radixlm.memory.slots import SlotAllocator
from radixlm.self_check.check import Holding, check


@dataclass
class Request:
    slot: int
    key: str | None
    tokens: list[int]
    table: np.ndarray
    row: np.ndarray
    handle: Handle
    num_computed: int
    num_owned: int
    is_window_locked: bool = True

    def ids(self, num_tokens):
        return np.array(self.tokens[:num_tokens], np.int32)


# long prompts of few symbols: many hits, many requests that end inside or after others
BLOCKS = st.integers(1, 14).flatmap(
    lambda n: st.lists(st.sampled_from([1, 1, 1, 2]), min_size=n, max_size=n)
)


class HybridMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4]),
        window_tokens=st.sampled_from([1, 3, 4, 6, 9]),
        eviction=st.sampled_from(["lru", "lfu"]),
    )
    def start(self, page_size, window_tokens, eviction):
        self.size, self.window_tokens = page_size, window_tokens
        self.pools = TwoPools(
            PageAllocator(40, page_size), PageAllocator(28, page_size), window_tokens
        )
        group = WindowGroup(self.pools.window, window_tokens)
        self.cache = RadixCache(self.pools.full, page_size, eviction, window=group)
        self.slots = SlotAllocator(4)
        self.running = []
        self.full_content, self.window_content = {}, {}

    def prefix(self, request_key, tokens, page):
        return (request_key, tuple(tokens[: (page + 1) * self.size]))

    def entries(self):
        """The tree's content page by page: prefix -> (page, window page or 0)."""
        found = {}
        for node in self.cache.tree.nodes():
            path = node.path()
            key = path[0].edge[0]
            tokens = [token for part in path for token in page_ids(part.tokens).tolist()]
            start = len(tokens) // self.size - node.num_pages
            for i, page in enumerate(page_ids(node.pages).tolist()):
                live = node.window_pages
                window = 0 if live is None else int(page_ids(live)[i])
                found[self.prefix(key, tokens, start + i)] = (page, window)
        return found

    def best_hit(self, key, tokens):
        """The longest prefix, in pages, whose last `window_tokens` tokens are live."""
        entries, best, num_pages = self.entries(), 0, 0
        windows = []
        while (num_pages + 1) * self.size <= len(tokens):
            entry = entries.get(self.prefix(key, tokens, num_pages))
            if entry is None:
                break
            windows.append(entry[1])
            num_pages += 1
            first = max(0, num_pages * self.size - self.window_tokens) // self.size
            if all(windows[first:]):
                best = num_pages
        return best

    def expect_content(self, request, num_tokens):
        """All full pages, and the window pages that the token at `num_tokens` reads."""
        for i in range(num_tokens // self.size):
            prefix = self.prefix(request.key, request.tokens, i)
            assert self.full_content[int(request.table[i])] == prefix
            if (i + 1) * self.size > num_tokens - self.window_tokens + 1:
                assert self.window_content[int(request.row[i])] == prefix

    @precondition(lambda self: self.slots.num_free)
    @rule(
        blocks=BLOCKS,
        key=st.sampled_from([None, "a"]),
        num_rest=st.integers(0, 3),
    )
    def admit(self, blocks, key, num_rest):
        tokens = [token for block in blocks for token in [0] * (self.size - 1) + [block]]
        tokens += [0] * min(num_rest, self.size - 1)
        best = self.best_hit(key, tokens[:-1])
        array = np.array(tokens[:-1], np.int32)
        assert self.cache.peek(array, key) == best * self.size
        match = self.cache.match(array, key)
        assert match.num_tokens == best * self.size == len(match.window_pages) * self.size
        self.cache.lock(match.handle)
        request = Request(
            self.slots.alloc(), key, tokens, match.pages, match.window_pages, match.handle,
            match.num_tokens, best,
        )  # fmt: skip
        self.expect_content(request, match.num_tokens)
        self.running.append(request)

    def pick(self, data):
        return data.draw(st.sampled_from(self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_new=st.integers(1, 20))
    def compute(self, data, num_new):
        request = self.pick(data)
        end = min(request.num_computed + num_new, len(request.tokens))
        num_pages = -(-end // self.size) - len(request.table)
        self.cache.evict(num_pages - self.pools.full.num_free)
        self.cache.evict_window(num_pages - self.pools.window.num_free)
        pages = self.pools.alloc(num_pages)
        if pages is None:
            return
        self.expect_content(request, request.num_computed)
        request.table = np.concatenate([request.table, pages[0]])
        request.row = np.concatenate([request.row, pages[1]])
        for i in range(request.num_computed // self.size, end // self.size):
            prefix = self.prefix(request.key, request.tokens, i)
            self.full_content[int(request.table[i])] = prefix
            self.window_content[int(request.row[i])] = prefix
        request.num_computed = end
        self.pools.free_dead(request.row, end, request.num_owned)
        live = self.pools.table.num_live_pages(end)
        assert int((request.row != 0).sum()) <= live

    def hand_over(self, request):
        result = self.cache.insert(
            request.ids(request.num_computed), request.table, request.key, request.row
        )
        num_pages = result.num_cached_pages
        assert num_pages == request.num_computed // self.size
        self.pools.free(result.duplicate_pages, result.duplicate_window_pages)
        request.table[:num_pages] = result.pages
        request.row[:num_pages] = result.window_pages
        self.expect_content(request, num_pages * self.size)
        return result

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cache_chunk(self, data):
        request = self.pick(data)
        result = self.hand_over(request)
        self.cache.lock(result.handle)
        self.cache.unlock(request.handle, request.is_window_locked)
        request.handle, request.is_window_locked = result.handle, True
        request.num_owned = result.num_cached_pages

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pass_the_window(self, data):
        request = self.pick(data)
        first = self.pools.table.first_live_page(request.num_computed)
        if request.is_window_locked and first >= request.num_owned:
            self.cache.unlock_window(request.handle)
            request.is_window_locked = False

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_cached=st.booleans())
    def finish(self, data, is_cached):
        self.end(self.pick(data), is_cached)

    def end(self, request, is_cached):
        num_kept = request.num_owned
        if is_cached:
            num_kept = self.hand_over(request).num_cached_pages
        self.pools.free(request.table[num_kept:], request.row[num_kept:])
        self.cache.unlock(request.handle, request.is_window_locked)
        self.slots.free(request.slot)
        self.running.remove(request)

    @rule(num_pages=st.integers(1, 10))
    def evict(self, num_pages):
        free, evictable = self.pools.full.num_free, self.cache.num_evictable
        num_freed = self.cache.evict(num_pages)
        assert num_freed >= min(num_pages, evictable)
        assert self.pools.full.num_free == free + num_freed

    @rule(num_pages=st.integers(1, 10))
    def evict_window(self, num_pages):
        free, evictable = self.pools.window.num_free, self.cache.num_window_evictable
        num_freed = self.cache.evict_window(num_pages)
        assert num_freed >= min(num_pages, evictable)
        assert self.pools.window.num_free == free + num_freed

    @invariant()
    def all_is_owned_and_rightly_filled(self):
        if not hasattr(self, "cache"):
            return
        holdings = [
            Holding(r.slot, r.table, r.handle, r.row, r.is_window_locked) for r in self.running
        ]
        pools = self.pools
        assert check(pools.full, self.slots, self.cache, holdings, pools.window) == []
        for prefix, (page, window) in self.entries().items():
            assert self.full_content[page] == prefix
            assert not window or self.window_content[window] == prefix

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for request in list(self.running):
            self.end(request, is_cached=True)
        self.cache.reset()
        for pool in (self.pools.full, self.pools.window):
            assert pool.num_free == pool.num_total


TestHybridRequests = HybridMachine.TestCase
TestHybridRequests.settings = settings(
    max_examples=50, stateful_step_count=35, derandomize=True, deadline=None
)
