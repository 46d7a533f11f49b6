"""Every kind of invariant violation is found with its numbers, and repaired if possible."""

import numpy as np
import pytest

from radixlm.memory.check import Holding, Repair, check, repair
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.chunk import ChunkCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator


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
def house():
    return Pools()


def test_no_violation(house):
    assert house.check() == []
    assert house.repair() == Repair([], 0, 0, [])
    assert house.check([(0, house.own, house.handle)]) == []


def test_a_request_that_ended_without_freeing(house):
    violations = house.check([])
    assert "1 slots in use, 0 running: 1 leaked, first 0" in violations
    assert any("has 1 locks, requests hold 0" in b for b in violations)
    assert violations[-1] == (
        "full: the allocator has 2 pages held by requests, 0 are: 2 leaked [7, 8], 0 not booked []"
    )
    mended = house.repair([])
    assert mended.remaining == [] and (mended.num_pages, mended.num_slots) == (2, 1)
    assert len(mended.violations) == len(violations)
    assert house.cache.num_locked == 0
    house.cache.reset()
    assert house.pool.num_free == 19


def test_a_page_that_two_requests_write(house):
    house.running.append((house.slots.alloc(), house.own[:1], None))
    page = house.own[0]
    assert house.check() == [f"full: page {page} has 2 owners: slot 0, slot 1"]
    assert house.repair().remaining == house.check()
    assert house.pool.num_free == 11


def test_a_page_of_the_cache_in_a_request_that_has_not_locked_it(house):
    page = house.cache.match(ids(9, 9)).pages[:1]
    house.running.append((house.slots.alloc(), page, None))
    assert house.check()[0] == f"full: page {page[0]} has 2 owners: the prefix cache, slot 1"


def test_pages_outside_the_pool_and_the_null_page(house):
    house.running.append((house.slots.alloc(), ids(0, 20), None))
    assert house.check() == ["full: 2 of 2 pages of slot 1 are not in the pool of 20"]


def test_a_request_without_a_slot(house):
    house.running.append((3, ids(), None))
    assert house.check() == ["1 of 2 running requests have a free slot, first 3"]
    assert house.repair().remaining == []
    assert house.slots.used() == [0, 3]


def test_two_requests_in_one_slot(house):
    house.running.append((0, ids(), None))
    assert house.check() == ["slot 0 has 2 running requests"]


def test_a_lost_lock_and_a_dead_handle(house):
    house.cache.unlock(house.handle)
    assert house.check() == ["node 1 has 0 locks, requests hold 1"]
    assert house.repair().remaining == [] and house.cache.num_locked == 4
    house.cache.unlock(house.handle)
    house.cache.evict(19)
    violations = house.check()
    assert "a request has locked a prefix that is no longer cached" in violations
    assert any("4 not booked" in b for b in violations)


def test_wrong_counters_and_free_list(house):
    house.cache.total_pages += 3
    house.pool._num_free -= 1
    violations = house.check()
    assert "the tree counts 9 pages, 4 locked; its nodes hold 6, 4 locked" in violations
    assert "full: 10 pages in the free list, 11 are free" in violations
    mended = house.repair()
    assert mended.remaining == [] and mended.num_pages == 1


def test_a_broken_shape(house):
    node = next(iter(house.cache.tree.nodes()))
    node.tokens = bytes(reversed(node.tokens))
    assert any("does not stand under its first page" in b for b in house.check())
    node.tokens = node.tokens[:4]
    assert any("has 1 tokens in" in b for b in house.check())
    node.num_pages += 1
    assert any(f"page ids, counts {node.num_pages}" in b for b in house.check())


def test_many_shared_pages_are_counted_not_listed():
    pool, slots = PageAllocator(200, 1), SlotAllocator(2)
    pages = pool.alloc(100)
    running = [Holding(slots.alloc(), pages, None), Holding(slots.alloc(), pages, None)]
    violations = check(pool, slots, ChunkCache(1), running)
    assert violations[-1] == "full: 100 pages have several owners" and len(violations) == 9


def test_without_a_prefix_cache():
    pool, slots = PageAllocator(20, 4), SlotAllocator(2)
    running = [(slots.alloc(), pool.alloc(3), ChunkCache(4).match(ids(1)).handle)]
    assert check(pool, slots, ChunkCache(4), running) == []
    assert check(pool, slots, ChunkCache(4), []) != []
