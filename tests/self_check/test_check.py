"""Every kind of invariant violation is found with its numbers, and repaired if possible."""

import numpy as np
import pytest

from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.self_check.check import Holding, Repair, check, repair


def ids(*tokens):
    return np.array(tokens, np.int32)


class Pools:
    """Slot 0 runs 6 tokens, of which 4 are cached and locked; 2 more cached pages are unused."""

    def __init__(self):
        self.pool, self.slots = PageAllocator(20, 1), SlotAllocator(4)
        self.cache = RadixCache(self.pool, 1)
        result = self.cache.insert(ids(1, 2, 3, 4), self.pool.alloc(4))
        self.cache.insert(ids(9, 9), self.pool.alloc(2))
        self.handle = result.handle
        self.cache.lock(self.handle)
        self.own = self.pool.alloc(2)
        self.table = np.concatenate([result.pages, self.own])
        self.running = [(self.slots.alloc(), self.table, self.handle)]

    def check(self, running=None):
        running = self.running if running is None else running
        return check(self.pool, self.slots, self.cache, running)

    def repair(self, running=None):
        running = self.running if running is None else running
        return repair(self.pool, self.slots, self.cache, running)


@pytest.fixture
def pools():
    return Pools()


def test_no_violation(pools):
    assert pools.check() == []
    assert pools.repair() == Repair([], 0, 0, [])
    assert pools.check([(0, pools.own, pools.handle)]) == []


def test_a_request_that_ended_without_freeing(pools):
    violations = pools.check([])
    assert "1 slots in use, 0 running: 1 leaked, first 0" in violations
    assert any("has 1 locks, requests hold 0" in b for b in violations)
    assert violations[-1] == (
        "full: the allocator has 2 pages held by requests, 0 are: 2 leaked [7, 8], 0 not booked []"
    )
    assert pools.slots.alloc() == 1
    mended = pools.repair([])
    assert mended.remaining == [] and (mended.num_pages, mended.num_slots) == (2, 2)
    assert len(mended.violations) == len(violations)
    assert pools.cache.num_locked == 0
    pools.cache.reset()
    assert pools.pool.num_free == 19


def test_a_page_that_two_requests_write(pools):
    pools.running.append((pools.slots.alloc(), pools.own[:1], None))
    page = pools.own[0]
    assert pools.check() == [f"full: page {page} has 2 owners: slot 0, slot 1"]
    assert pools.repair().remaining == pools.check()
    assert pools.pool.num_free == 11


def test_a_page_of_the_cache_in_a_request_that_has_not_locked_it(pools):
    page = pools.cache.match(ids(9, 9)).pages[:1]
    pools.running.append((pools.slots.alloc(), page, None))
    assert pools.check()[0] == f"full: page {page[0]} has 2 owners: the prefix cache, slot 1"


def test_pages_outside_the_pool_and_the_null_page(pools):
    pools.running.append((pools.slots.alloc(), ids(0, 20), None))
    assert pools.check() == ["full: 2 of 2 pages of slot 1 are not in the pool of 20"]


def test_a_request_without_a_slot(pools):
    pools.running.append((3, ids(), None))
    assert pools.check() == ["1 of 2 running requests have a free slot, first 3"]
    assert pools.repair().remaining == []
    assert pools.slots.used() == [0, 3]


def test_two_requests_in_one_slot(pools):
    pools.running.append((0, ids(), None))
    assert pools.check() == ["slot 0 has 2 running requests"]


def test_a_lost_lock_and_a_dead_handle(pools):
    pools.cache.unlock(pools.handle)
    assert pools.check() == ["node 1 has 0 locks, requests hold 1"]
    assert pools.repair().remaining == [] and pools.cache.num_locked == 4
    pools.cache.unlock(pools.handle)
    pools.cache.evict(19)
    violations = pools.check()
    assert "a request has locked a prefix that is no longer cached" in violations
    assert any("4 not booked" in b for b in violations)


def test_wrong_counters_and_free_list(pools):
    pools.cache.total_pages += 3
    pools.pool._num_free -= 1
    violations = pools.check()
    assert "the tree counts 9 pages, 4 locked; its nodes hold 6, 4 locked" in violations
    assert "full: 10 pages in the free list, 11 are free" in violations
    mended = pools.repair()
    assert mended.remaining == [] and mended.num_pages == 1


def test_a_broken_shape(pools):
    node = next(iter(pools.cache.tree.nodes()))
    node.tokens = bytes(reversed(node.tokens))
    assert any("does not stand under its first page" in b for b in pools.check())
    node.tokens = node.tokens[:4]
    assert any("has 1 tokens in" in b for b in pools.check())
    node.num_pages += 1
    assert any(f"page ids, counts {node.num_pages}" in b for b in pools.check())


def test_many_shared_pages_are_counted_not_listed():
    pool, slots = PageAllocator(200, 1), SlotAllocator(2)
    pages = pool.alloc(100)
    running = [Holding(slots.alloc(), pages, None), Holding(slots.alloc(), pages, None)]
    violations = check(pool, slots, PrefixCache(1), running)
    assert violations[-1] == "full: 100 pages have several owners" and len(violations) == 9


def test_without_a_prefix_cache():
    pool, slots = PageAllocator(20, 4), SlotAllocator(2)
    running = [(slots.alloc(), pool.alloc(3), PrefixCache(4).match(ids(1)).handle)]
    assert check(pool, slots, PrefixCache(4), running) == []
    assert check(pool, slots, PrefixCache(4), []) != []
