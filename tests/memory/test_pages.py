"""The page allocator against a set, and every kind of misuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvariantError
from radixlm.memory.pages import CACHED, FREE, HELD, PageAllocator


def test_low_pages_come_first_and_the_null_page_never():
    pool = PageAllocator(8, 16)
    assert (pool.num_total, pool.num_free) == (7, 7)
    pages = pool.alloc(3)
    assert pages.dtype == np.int32 and pages.tolist() == [1, 2, 3]
    assert pool.alloc(5) is None and pool.num_free == 4
    assert pool.alloc(4).tolist() == [4, 5, 6, 7]
    assert pool.alloc(1) is None and pool.alloc(0).tolist() == []


def test_freed_pages_are_reused_in_order():
    pool = PageAllocator(8, 1)
    pages = pool.alloc(7)
    pool.free(pages[4:6])
    assert pool.alloc(2).tolist() == pages[4:6].tolist()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([3, 3], "named twice"),
        ([0], "page 0 is reserved"),
        ([5], "page 5 is free"),
        ([2], "page 2 is owned by the prefix cache"),
        ([1, -1], "page ids -1 .. 1"),
        ([9], "in a pool of 8"),
    ],
)
def test_a_wrong_free_changes_nothing(pages, message):
    pool = PageAllocator(8, 1)
    pool.alloc(4)
    pool.adopt([2])
    with pytest.raises(InvariantError, match=message):
        pool.free(pages)
    assert pool.num_free == 3 and pool.pages_in(HELD).tolist() == [1, 3, 4]
    assert pool.audit() == []


@pytest.mark.parametrize("num_named", [3, 40])
def test_a_page_named_twice_among_few_and_among_many(num_named):
    pool = PageAllocator(100, 1)
    pages = pool.alloc(60)[:num_named]
    pages[-1] = pages[1]
    with pytest.raises(InvariantError, match="page 2 is named twice"):
        pool.free(pages)
    pool.free(np.unique(pages))
    assert pool.num_free == 39 + num_named - 1 and pool.audit() == []


def test_double_free_across_calls():
    pool = PageAllocator(8, 1)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(InvariantError, match="is free, expected held"):
        pool.free(pages)


def test_only_the_cache_releases_what_it_adopted():
    pool = PageAllocator(4, 1)
    pages = pool.alloc(3)
    pool.adopt(pages[:2])
    assert pool.pages_in(CACHED).tolist() == [1, 2]
    with pytest.raises(InvariantError, match="expected owned by the prefix cache"):
        pool.release(pages)
    pool.release(pages[:2])
    pool.free(pages[2:])
    assert pool.num_free == 3


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0)])
def test_impossible_pools(sizes):
    with pytest.raises(InvariantError):
        PageAllocator(*sizes)


def test_negative_alloc():
    with pytest.raises(InvariantError, match="-1 pages"):
        PageAllocator(4, 1).alloc(-1)


def test_audit_finds_a_broken_free_list_and_rebuild_repairs_it():
    pool = PageAllocator(6, 1)
    pool.alloc(2)
    pool._stack[0] = 1
    assert pool.audit() == ["3 pages in the free list, 3 are free"]
    pool.rebuild(held=np.array([2], np.int32), cached=np.array([5], np.int32))
    assert pool.audit() == [] and pool.pages_in(FREE).tolist() == [1, 3, 4]
    assert sorted(pool.alloc(3).tolist()) == [1, 3, 4]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_equals_a_set(moves):
    pool, held = PageAllocator(20, 4), []
    for is_alloc, n in moves:
        if is_alloc:
            pages = pool.alloc(n)
            assert (pages is None) == (n > 19 - len(held))
            if pages is not None:
                assert not set(pages.tolist()) & set(held) and 0 not in pages
                held += pages.tolist()
        else:
            pool.free(held[:n])
            held = held[n:]
        assert pool.num_free == 19 - len(held)
        assert pool.audit() == []
