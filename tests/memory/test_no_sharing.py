"""The cache without sharing: all pages stay the caller's."""

import numpy as np

from radixlm.memory.prefix.base import PrefixCache
from radixlm.self_check.audit import audit


def test_nothing_is_cached():
    cache = PrefixCache(4)
    ids, pages = np.arange(8, dtype=np.int32), np.array([1, 2], np.int32)
    result = cache.insert(ids, pages)
    cache.lock(result.handle)
    cache.unlock(result.handle)
    cache.unlock_window(result.handle)
    assert (result.num_cached_pages, result.num_shared_pages) == (0, 0)
    assert result.pages.tolist() == result.duplicate_pages.tolist() == []
    match = cache.match(ids)
    assert (match.num_tokens, match.pages.tolist(), match.window_pages) == (0, [], None)
    assert cache.peek(ids) == cache.evict(3) == cache.evict_window(3) == 0
    assert cache.num_evictable == cache.num_locked == cache.total_pages == 0
    assert cache.num_window_evictable == 0
    assert cache.find_tail(match.handle, ids[:3]) is None
    assert not cache.insert_tail(match.handle, ids[:3], 1)
    cache.reset()
    found = audit(cache, [(match.handle, True), (None, True)])
    assert found.violations == [] and len(found.paths) == len(found.window_paths) == 2


def test_hybrid_rows_are_empty_not_absent():
    cache = PrefixCache(4, is_hybrid=True)
    assert cache.match(np.arange(8, dtype=np.int32)).window_pages.tolist() == []
