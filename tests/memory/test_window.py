"""Sliding windows case by case: what may be freed, what a hit needs, who owns a revived page."""

import numpy as np
import pytest
from tests.memory.two_pools import TwoPools

from radixlm.base.errors import InvariantError
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup, WindowTable
from radixlm.memory.slots import SlotAllocator
from radixlm.self_check.check import Holding, check, repair


def ids(*tokens):
    return np.array(tokens, np.int32)


def make(window_tokens, page_size=1, num_pages=64):
    pools = TwoPools(
        PageAllocator(num_pages, page_size), PageAllocator(num_pages, page_size), window_tokens
    )
    group = WindowGroup(pools.window, window_tokens)
    return pools, RadixCache(pools.full, page_size, window=group)


def put(pools, cache, tokens, num_null=0):
    """Insert `tokens` with `num_null` window pages already freed."""
    full, window = pools.alloc(len(tokens) // pools.full.page_size)
    pools.window.free(window[:num_null])
    window[:num_null] = 0
    result = cache.insert(tokens, full, None, window)
    pools.free(result.duplicate_pages, result.duplicate_window_pages)
    return result


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window_tokens", [1, 4, 5, 17])
def test_the_table_keeps_the_window_and_little_more(window_tokens, page_size):
    table = WindowTable(window_tokens, page_size)
    for num_computed in range(80):
        first = table.first_live_page(num_computed)
        assert first * page_size <= max(0, num_computed - window_tokens)
        whole = num_computed // page_size * page_size
        assert (first + 1) * page_size > whole - window_tokens
        assert first <= max(0, whole - window_tokens) // page_size, "the cache needs its window"
        assert table.num_live_pages(num_computed, 7) == -(-(num_computed + 7) // page_size) - first


def test_dead_pages_are_freed_once_and_cached_ones_never():
    table = WindowTable(window_tokens=4, page_size=2)
    row = ids(1, 2, 3, 4, 5, 6)
    assert table.take_dead(row, 4).tolist() == []
    assert table.take_dead(row, 8, start_page=1).tolist() == [2]
    assert row.tolist() == [0, 0, 3, 4, 5, 6]
    assert table.take_dead(row, 9).tolist() == []
    assert table.take_dead(row, 10, start_page=5).tolist() == []
    assert row.tolist() == [0, 0, 0, 4, 5, 6]
    assert table.take_dead(row, 99).tolist() == [4, 5, 6]
    few = ids(1, 0, 3, 0, 5, 6)  # states of some pages
    assert table.take_dead(few, 12).tolist() == [1, 3] and few.tolist() == [0, 0, 0, 0, 5, 6]


def test_a_group_needs_a_window():
    with pytest.raises(InvariantError, match="window of 0"):
        WindowGroup(PageAllocator(5, 2), 0)


def test_a_hit_gives_window_pages_of_the_window_only():
    pools, cache = make(window_tokens=5, page_size=2)
    result = put(pools, cache, ids(*range(12)))
    match = cache.match(ids(*range(12)))
    assert match.num_tokens == 12 and match.pages.tolist() == result.pages.tolist()
    assert match.window_pages.tolist() == [0, 0, 0, 4, 5, 6]
    assert cache.match(ids(*range(5))).window_pages.tolist() == [1, 2]


def test_a_hit_may_not_end_too_close_to_a_tombstone():
    pools, cache = make(window_tokens=3)
    put(pools, cache, ids(*range(10)), num_null=4)
    # tokens 0..3 have no window pages; a match end needs three live ones before it
    assert [cache.peek(ids(*range(n))) for n in (4, 5, 6, 7, 8, 10)] == [0, 0, 0, 7, 8, 10]
    assert cache.match(ids(*range(6))).num_tokens == 0
    assert len(list(cache.tree.nodes())) == 2, "a match that may not end there must not split"


def test_inner_nodes_become_tombstones_and_leaves_are_removed():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(1, 2, 3, 4))
    put(pools, cache, ids(1, 2, 9, 9))
    cache.match(ids(1, 2))
    cache.match(ids(1, 2, 9, 9))
    assert cache.evict_window(1) == 2, "node (3, 4), the least recently needed, is a leaf"
    assert cache.peek(ids(1, 2, 3, 4)) == 2 and cache.total_pages == 4
    assert cache.evict_window(1) == 2, "node (1, 2) is needed by its child: a tombstone"
    assert cache.peek(ids(1, 2)) == 0 and cache.peek(ids(1, 2, 9, 9)) == 4
    assert cache.evict_window(1) == 2
    assert cache.total_pages == 0, "the tombstone goes with its last child"
    assert cache.num_evicted == 6
    assert pools.full.num_free == pools.window.num_free == 63


def test_evicting_the_last_live_leaf_removes_the_tombstone():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(*range(8)), num_null=6)
    assert (cache.total_pages, cache.num_window_evictable) == (8, 2)
    assert cache.evict(1) == 8
    assert pools.full.num_free == pools.window.num_free == 63


def test_a_tombstone_is_revived_by_recomputed_pages():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(*range(8)), num_null=6)
    full, window = pools.alloc(5)
    pools.window.free(window[:2])
    window[:2] = 0
    result = cache.insert(ids(*range(5)), full, None, window)
    assert result.duplicate_pages.tolist() == full.tolist()
    assert result.duplicate_window_pages.tolist() == []
    assert result.window_pages.tolist() == [0, 0, 0, *window[3:]]
    assert cache.peek(ids(*range(5))) == 5 and cache.peek(ids(*range(3))) == 0
    assert cache.window.total_pages == 2 + 3
    assert check(pools.full, SlotAllocator(1), cache, [], pools.window) != [], "duplicates"
    pools.full.free(result.duplicate_pages)
    assert check(pools.full, SlotAllocator(1), cache, [], pools.window) == []


def test_duplicate_window_pages_are_freed():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(1, 2, 3))
    full, window = pools.alloc(3)
    result = cache.insert(ids(1, 2, 3), full, None, window)
    assert result.duplicate_window_pages.tolist() == window.tolist()
    pools.free(result.duplicate_pages, result.duplicate_window_pages)
    assert check(pools.full, SlotAllocator(1), cache, [], pools.window) == []


def test_a_lock_holds_exactly_the_window():
    pools, cache = make(window_tokens=3, page_size=2)
    handle = put(pools, cache, ids(*range(12))).handle
    cache.lock(handle)
    assert (cache.num_locked, cache.window.num_locked, cache.num_window_evictable) == (6, 2, 4)
    cache.match(ids(*range(10)))
    cache.match(ids(*range(2)))
    assert cache.evict_window(9) == 4
    assert cache.evict(9) == 0
    cache.unlock_window(handle)
    assert (cache.num_locked, cache.num_window_evictable) == (6, 2)
    assert cache.evict_window(9) == 2 and cache.total_pages == 6
    cache.unlock(handle, is_window_locked=False)
    assert cache.evict(1) == 6 and pools.full.num_free == pools.window.num_free == 63


def test_a_node_split_by_a_lock_keeps_its_age():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(9, 9))
    handle = put(pools, cache, ids(1, 2, 3, 4)).handle
    cache.lock(handle)
    assert cache.evict_window(1) == 2 and cache.peek(ids(9, 9)) == 0
    assert cache.peek(ids(1, 2)) == 2
    cache.unlock(handle)


def test_full_eviction_leaves_no_window_candidates():
    pools, cache = make(window_tokens=2)
    put(pools, cache, ids(9, 9))
    put(pools, cache, ids(1, 2, 3, 4))
    assert cache.evict(99) == 6
    assert not cache.window.queue._members and not cache.queue._members


def test_wrong_use_is_refused():
    pools, cache = make(window_tokens=2)
    handle = put(pools, cache, ids(1, 2, 3)).handle
    cache.lock(handle)
    cache.unlock_window(handle)
    with pytest.raises(InvariantError, match="more often than locked"):
        cache.unlock_window(handle)
    cache.evict_window(9)
    with pytest.raises(InvariantError, match="window pages are gone"):
        cache.lock(handle)
    full, window = pools.alloc(3)
    with pytest.raises(InvariantError, match="only"):
        cache.insert(ids(5, 6, 7), full)
    window[1] = 0
    with pytest.raises(InvariantError, match="null page behind"):
        cache.insert(ids(5, 6, 7), full, None, window)


def test_repair_of_the_window_group():
    pools, cache = make(window_tokens=2)
    slots = SlotAllocator(2)
    result = put(pools, cache, ids(1, 2, 3))
    cache.lock(result.handle)
    running = [Holding(slots.alloc(), result.pages, result.handle, result.window_pages)]
    assert check(pools.full, slots, cache, running, pools.window) == []
    cache.window.num_locked += 1
    pools.window.alloc(4)
    violations = check(pools.full, slots, cache, running, pools.window)
    assert any(
        "window group counts 3 pages, 3 locked; its nodes hold 3, 2" in b for b in violations
    )
    assert any(b.startswith("window: the allocator has 4 pages held") for b in violations)
    mended = repair(pools.full, slots, cache, running, pools.window)
    assert mended.remaining == [] and mended.num_pages == 4
    cache.unlock(result.handle)
    assert cache.evict_window(9) == 3
