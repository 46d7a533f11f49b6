"""Pages that are filled in part: found by their tokens, to the token, and owned by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvariantError
from radixlm.memory.pages import CACHED, PageAllocator
from radixlm.memory.prefix.base import Tail
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup
from radixlm.self_check.audit import audit

NUM_PAGES = 60
SIZE = 4


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Prompts:
    """A cache, filled as requests fill it; ``content[page]``: the tokens written there."""

    def __init__(self, window: bool = False) -> None:
        self.pool = PageAllocator(NUM_PAGES, SIZE)
        self.second = PageAllocator(NUM_PAGES, SIZE) if window else None
        group = WindowGroup(self.second, 2 * SIZE) if self.second is not None else None
        self.cache = RadixCache(self.pool, SIZE, window=group)
        self.content: dict[int, tuple[int, ...]] = {}
        self.window_of: dict[int, int] = {}
        self.known: set[tuple[str | None, tuple[int, ...]]] = set()  # all that was ever put

    def put(self, tokens: list[int], key: str | None = None) -> None:
        """A request computes ``tokens`` and ends."""
        whole, rest = divmod(len(tokens), SIZE)
        pages = self.pool.alloc(whole + (rest > 0))
        assert pages is not None
        for i, page in enumerate(pages.tolist()):
            self.content[page] = tuple(tokens[i * SIZE : (i + 1) * SIZE])
        row = self.second.alloc(len(pages)) if self.second is not None else None
        if row is not None:
            self.window_of.update(zip(pages.tolist(), row.tolist(), strict=True))
        cut = whole * SIZE
        part = None if row is None else row[:whole]
        result = self.cache.insert(ids(*tokens[:cut]), pages[:whole], key, part)
        self.pool.free(result.duplicate_pages)
        if self.second is not None and result.duplicate_window_pages is not None:
            self.second.free(result.duplicate_window_pages)
        if rest:
            page = None if row is None else int(row[-1])
            tail = ids(*tokens[cut:])
            if not self.cache.insert_tail(result.handle, tail, int(pages[-1]), key, page):
                self.pool.free(pages[-1:])
                if self.second is not None and row is not None:
                    self.second.free(row[-1:])
        self.known |= {(key, tuple(tokens[:end])) for end in range(1, len(tokens) + 1)}

    def hit(self, tokens: list[int], key: str | None = None) -> int:
        """Tokens of the longest hit; the page of a tail has them."""
        match = self.cache.match(ids(*tokens), key)
        rest = tokens[match.num_tokens :][: SIZE - 1]
        tail = self.cache.find_tail(match.handle, ids(*rest), key)
        if tail is None:
            return match.num_tokens
        assert self.content[tail.page][: tail.num_tokens] == tuple(rest[: tail.num_tokens])
        if self.second is not None:
            assert tail.window_page == self.window_of[tail.page]
        return match.num_tokens + tail.num_tokens

    def longest(self, tokens: list[int], key: str | None = None) -> int:
        """What one who remembers every prefix finds."""
        ends = range(len(tokens), 0, -1)
        return next((end for end in ends if (key, tuple(tokens[:end])) in self.known), 0)

    def check(self) -> None:
        found = audit(self.cache, [])
        assert found.violations == [] and self.pool.audit() == []
        assert sorted(found.pages.tolist()) == self.pool.pages_in(CACHED).tolist()
        assert self.pool.num_free + len(found.pages) == self.pool.num_total
        if self.second is not None:
            assert sorted(found.window_pages.tolist()) == self.second.pages_in(CACHED).tolist()
            assert self.second.num_free + len(found.window_pages) == self.second.num_total


texts = st.lists(st.integers(0, 1), max_size=3 * SIZE)
keys = st.sampled_from([None, "", "a"])


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.tuples(texts, keys), max_size=12), st.lists(texts, max_size=6))
def test_hits_are_exact_to_the_token(
    window: bool, puts: list[tuple[list[int], str | None]], queries: list[list[int]]
) -> None:
    prompts = Prompts(window)
    for tokens, key in puts:
        prompts.put(tokens, key)
        prompts.check()
    for tokens in [*queries, *(tokens for tokens, _ in puts)]:
        for key in (None, "", "a"):
            assert prompts.hit(tokens, key) == prompts.longest(tokens, key)
    prompts.cache.evict(NUM_PAGES)
    prompts.check()
    assert prompts.cache.total_pages == 0
    assert all(prompts.hit(tokens, key) == 0 for tokens, key in puts)


def test_a_longer_page_takes_the_place_of_a_tail() -> None:
    prompts = Prompts()
    prompts.put([1, 2, 3, 4, 5])
    prompts.put([1, 2, 3, 4, 5, 6])
    assert prompts.cache.total_pages == 2  # the tail [5] is gone
    prompts.put([1, 2, 3, 4, 5])
    assert prompts.cache.total_pages == 2  # it would say nothing new
    prompts.put([1, 2, 3, 4, 5, 6, 7, 8])
    assert prompts.cache.total_pages == 2 and prompts.hit([1, 2, 3, 4, 5, 6, 9]) == 6


def test_tails_go_first_and_one_by_one() -> None:
    prompts = Prompts()
    prompts.put([1, 2, 3, 4, 5])
    prompts.put([1, 2, 3, 4, 6])
    assert prompts.hit([1, 2, 3, 4, 5]) == 5  # used later than the other
    assert prompts.cache.evict(1) == 1
    assert prompts.hit([1, 2, 3, 4, 6]) == 4 and prompts.hit([1, 2, 3, 4, 5]) == 5
    prompts.check()


def test_too_few_shared_tokens_are_no_use() -> None:
    prompts = Prompts()
    prompts.put([1, 2, 3, 4])
    cache = prompts.cache
    (node,) = cache.tree.nodes()
    root, before = cache.match(ids()).handle, (node.num_hits, node.last_access)
    assert cache.find_tail(root, ids(1, 2), at_least=3) is None
    assert (node.num_hits, node.last_access) == before
    found = cache.find_tail(root, ids(1, 2), at_least=2)
    assert found is not None and found.num_tokens == 2 and node.num_hits == before[0] + 1


def test_a_tail_without_its_window_page_is_no_hit() -> None:
    prompts = Prompts(window=True)
    prompts.put([1, 2, 3, 4, 5, 6, 7, 8])
    handle = prompts.cache.match(ids(1, 2, 3, 4)).handle
    prompts.cache.lock(handle)
    prompts.cache.unlock_window(handle)
    prompts.cache.evict_window(NUM_PAGES)
    assert prompts.cache.find_tail(handle, ids(5, 6)) is None
    prompts.cache.unlock(handle, is_window_locked=False)
    prompts.check()


def test_what_is_no_tail_is_refused() -> None:
    prompts = Prompts()
    root = prompts.cache.match(ids()).handle
    for tokens in ((), (1, 2, 3, 4)):
        with pytest.raises(InvariantError, match="a tail of"):
            prompts.cache.insert_tail(root, ids(*tokens), 1)
    with pytest.raises(InvariantError, match="window pages are given"):
        prompts.cache.insert_tail(root, ids(1), 1, None, 1)
    with pytest.raises(InvariantError, match="free, expected held"):
        prompts.cache.insert_tail(root, ids(1), 1)
    prompts.check()


def test_damage_is_found() -> None:
    prompts = Prompts()
    prompts.put([1, 2, 3, 4, 5])
    node = next(iter(prompts.cache.tree.root.children.values()))
    node.heads = []
    assert "its children are" in audit(prompts.cache, []).violations[0]


class Log:
    def __init__(self) -> None:
        self.stored: list[tuple[list[int], list[int], int | None]] = []
        self.removed: list[int] = []

    def on_store(
        self, pages: np.ndarray, token_ids: np.ndarray, parent_page: int | None, key: str | None
    ) -> None:
        self.stored.append((pages.tolist(), token_ids.tolist(), parent_page))

    def on_remove(self, pages: np.ndarray) -> None:
        self.removed += pages.tolist()

    def on_reset(self) -> None:
        """Nothing to note."""


def test_events_tell_of_tails() -> None:
    log, pool = Log(), PageAllocator(8, SIZE)
    cache = RadixCache(pool, SIZE, events=log)
    pages = pool.alloc(2)
    assert pages is not None
    handle = cache.insert(ids(1, 2, 3, 4), pages[:1]).handle
    assert cache.insert_tail(handle, ids(5), int(pages[1]))
    assert cache.find_tail(handle, ids(5, 6)) == Tail(int(pages[1]), 1)
    assert log.stored[1] == ([int(pages[1])], [5], int(pages[0]))
    cache.evict(1)
    assert log.removed == [int(pages[1])]
