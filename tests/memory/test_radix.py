"""The radix tree case by case: sharing, isolation, locks, eviction order, events."""

import numpy as np
import pytest

from radixlm.base.errors import ConfigError, InvariantError
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import Handle
from radixlm.memory.prefix.radix import RadixCache
from radixlm.self_check.audit import audit


def ids(*tokens):
    return np.array(tokens, np.int32)


def make(page_size=1, num_pages=64, **options):
    pool = PageAllocator(num_pages, page_size)
    return pool, RadixCache(pool, page_size, **options)


def put(pool, cache, tokens, key=None):
    return cache.insert(tokens, pool.alloc(len(tokens) // pool.page_size), key)


def test_only_whole_pages_are_cached():
    pool, cache = make(page_size=4)
    pages = pool.alloc(3)
    result = cache.insert(ids(*range(10)), pages)
    assert result.num_cached_pages == 2
    assert cache.match(ids(*range(10))).num_tokens == 8
    assert cache.match(ids(*range(7))).num_tokens == 4
    assert cache.match(ids(0, 1, 2, 9)).num_tokens == 0
    pool.free(pages[2:])


def test_fewer_pages_than_tokens():
    pool, cache = make(page_size=2)
    result = cache.insert(ids(*range(9)), pool.alloc(2))
    assert result.num_cached_pages == 2 and cache.peek(ids(*range(9))) == 4


def test_namespaces_share_nothing():
    pool, cache = make()
    for key in (None, "", "lora", "lora2"):
        assert cache.match(ids(1, 2), key).num_tokens == 0
        put(pool, cache, ids(1, 2), key)
    hits = [cache.match(ids(1, 2), key).pages.tolist() for key in (None, "", "lora", "lora2")]
    assert hits == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_arrays_of_the_caller_are_not_kept():
    pool, cache = make()
    tokens = ids(1, 2, 3)
    result = put(pool, cache, tokens)
    tokens[:] = 7
    result.pages[:] = 0
    match = cache.match(ids(1, 2, 3))
    assert match.pages.tolist() == [1, 2, 3]
    match.pages[:] = 0
    assert cache.match(ids(1, 2, 3)).pages.tolist() == [1, 2, 3]


def test_other_integer_arrays_are_accepted():
    pool, cache = make()
    cache.insert(np.array([1, 2, 3], np.int64), pool.alloc(3).tolist())
    assert cache.match([1, 2, 3, 4]).num_tokens == 3
    assert cache.match(np.array([1, 0, 2, 0, 3], np.int32)[::2]).num_tokens == 3


def test_empty_prompts_match_nothing_and_may_be_locked():
    _, cache = make()
    match = cache.match(ids())
    cache.lock(match.handle)
    cache.lock(match.handle)
    assert cache.num_locked == 0
    cache.unlock(match.handle)
    assert cache.insert(ids(), ids()).num_cached_pages == 0
    assert cache.insert(ids(1, 2), ids()).num_cached_pages == 0


def test_a_handle_survives_splits_above_it():
    pool, cache = make()
    long = put(pool, cache, ids(1, 2, 3, 4, 5, 6))
    cache.lock(long.handle)
    cache.match(ids(1, 2, 3, 4))
    cache.match(ids(1, 2))
    assert audit(cache, [(long.handle, True)]).paths[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert cache.evict(9) == 0
    cache.unlock(long.handle)
    assert cache.num_locked == 0 and cache.evict(9) == 6


def test_locks_count():
    pool, cache = make()
    handle = put(pool, cache, ids(1, 2, 3)).handle
    short = cache.match(ids(1)).handle
    cache.lock(handle)
    cache.lock(short)
    cache.unlock(handle)
    assert (cache.num_locked, cache.num_evictable) == (1, 2)
    assert cache.evict(5) == 2
    cache.unlock(short)
    with pytest.raises(InvariantError, match="more often than locked"):
        cache.unlock(short)
    assert cache.evict(5) == 1


def test_stale_and_foreign_handles():
    pool, cache = make()
    handle = put(pool, cache, ids(1, 2, 3)).handle
    cache.evict(1)
    assert cache.num_evicted == 1
    for bad in (handle, Handle()):
        with pytest.raises(InvariantError, match="after its prefix was evicted"):
            cache.lock(bad)
    assert cache.match(ids(1, 2, 3)).num_tokens == 2


def test_lru_evicts_the_oldest_use_tail_first():
    pool, cache = make()
    put(pool, cache, ids(1, 1, 1))
    put(pool, cache, ids(2, 2))
    put(pool, cache, ids(3, 3))
    cache.match(ids(1, 1, 1))
    assert cache.peek(ids(2, 2)) == 2
    assert cache.evict(3) == 3
    assert [cache.peek(ids(n, n, n)) for n in (1, 2, 3)] == [3, 0, 1]


def test_lfu_keeps_frequent_matches():
    pool, cache = make(eviction="lfu")
    put(pool, cache, ids(1, 1))
    cache.match(ids(1, 1))
    put(pool, cache, ids(2, 2))
    put(pool, cache, ids(3, 3))
    assert cache.evict(3) == 3
    assert [cache.peek(ids(n, n)) for n in (1, 2, 3)] == [2, 0, 1]


def test_lfu_keeps_the_uses_of_a_node_after_a_split():
    pool, cache = make(eviction="lfu")
    put(pool, cache, ids(1, 1, 1))
    for _ in range(3):
        cache.match(ids(1, 1, 1))
    put(pool, cache, ids(2, 2))
    for _ in range(2):
        cache.match(ids(2, 2))
    cache.match(ids(1, 1))
    assert cache.evict(2) == 2 and cache.peek(ids(2, 2)) == 0
    cache.evict(1)
    put(pool, cache, ids(3))
    for _ in range(2):
        cache.match(ids(3))
    cache.evict(1)
    assert (cache.peek(ids(1, 1)), cache.peek(ids(3))) == (2, 0)


def test_grown_prefixes_are_evicted_from_their_ends():
    pool, cache = make(num_pages=512)
    for end in (1, 2, 3):
        for n in range(100):
            prompt = ids(n, 1, 2)[:end]
            match = cache.match(prompt)
            table = np.concatenate([match.pages, pool.alloc(end - len(match.pages))])
            cache.insert(prompt, table)
    assert cache.evict(150) == 150
    assert [cache.peek(ids(n, 1, 2)) for n in (0, 49, 50, 51, 99)] == [0, 0, 3, 3, 3]


def test_unknown_policy():
    with pytest.raises(ConfigError, match=r"'mru': use one of \['lfu', 'lru', 'slru'\]"):
        make(eviction="mru")


def test_page_sizes_must_agree():
    with pytest.raises(InvariantError, match="page size 4"):
        RadixCache(PageAllocator(4, 1), 4)


def test_inserting_pages_of_others_is_refused():
    pool, cache = make()
    result = put(pool, cache, ids(1, 2))
    with pytest.raises(InvariantError, match="owned by the prefix cache"):
        cache.insert(ids(5, 6), result.pages)
    with pytest.raises(InvariantError, match="free"):
        cache.insert(ids(5), ids(40))
    assert audit(cache, []).violations == [] and cache.total_pages == 2


def test_window_pages_need_a_window_group():
    pool, cache = make()
    pages = pool.alloc(1)
    with pytest.raises(InvariantError, match="window group"):
        cache.insert(ids(1), pages, None, pages)


def test_reset_waits_for_locks():
    pool, cache = make()
    handle = put(pool, cache, ids(1, 2)).handle
    cache.lock(handle)
    with pytest.raises(InvariantError, match="2 of 2 pages locked"):
        cache.reset()
    cache.unlock(handle)
    cache.reset()
    assert pool.num_free == pool.num_total and cache.peek(ids(1, 2)) == 0


class Log:
    def __init__(self):
        self.cached, self.lines = {}, []

    def on_store(self, pages, token_ids, parent_page, namespace):
        size = len(token_ids) // len(pages)
        for i, page in enumerate(pages.tolist()):
            tokens = tuple(token_ids[i * size : (i + 1) * size].tolist())
            self.cached[page] = (*self.cached.get(parent_page, (namespace,)), *tokens)
            parent_page = page

    def on_remove(self, pages):
        for page in pages.tolist():
            del self.cached[page]

    def on_reset(self):
        self.lines.append("reset")


def test_events_describe_the_whole_tree():
    log = Log()
    pool, cache = make(page_size=2, events=log)
    put(pool, cache, ids(1, 1, 2, 2), "a")
    pages = pool.alloc(3)
    result = cache.insert(ids(1, 1, 2, 2, 3, 3), pages, "a")
    pool.free(result.duplicate_pages)
    assert log.cached[result.pages[2]] == ("a", 1, 1, 2, 2, 3, 3)
    cache.evict(1)
    assert sorted(log.cached) == result.pages[:2].tolist()
    cache.reset()
    assert log.cached == {} and log.lines == ["reset"]
