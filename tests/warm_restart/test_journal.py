"""The page journal: what a new tree finds after a kill at any moment, and after damage."""

import contextlib
import random
import threading
import zlib

import numpy as np
import pytest

from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup
from radixlm.self_check.audit import audit
from radixlm.warm_restart.journal import PageJournal
from radixlm.warm_restart.journal_replay import JournalReplay

PAGE, NUM_PAGES, ROW = 4, 50, 24
NAMESPACES = tuple(CacheNamespace(cache_salt=salt) for salt in (None, "a", "b"))


class Killed(BaseException):
    pass


class Engine:
    """A tree over kept memory: the bytes of the journal and of two pools. The bytes of a page are
    made of its namespace and all tokens to its end."""

    def __init__(self, memory=None, has_window=False):
        size = PageJournal.num_bytes(NUM_PAGES, PAGE)
        is_new = memory is None
        self.memory = np.zeros(size + 2 * NUM_PAGES * ROW, np.uint8) if is_new else memory
        self.pools = self.memory[size:].reshape(2, NUM_PAGES, ROW)
        self.pages, window = PageAllocator(NUM_PAGES, PAGE), None
        if has_window:
            window = WindowGroup(PageAllocator(NUM_PAGES, PAGE), 2 * PAGE)
        self.cache = RadixCache(self.pages, PAGE, window=window)
        self.journal = PageJournal(self.memory[:size], NUM_PAGES, PAGE, self.digests)
        if not is_new:
            self.num_tokens = JournalReplay(self.journal, self.cache).run()
        self.cache.events = self.journal
        if window is not None:
            window.on_change = self.journal.on_window
        self.written = 0

    def digests(self, space, pages, seeds):
        pool = self.pools[space]
        return [zlib.crc32(pool[page], seed) for page, seed in zip(pages, seeds, strict=True)]

    def insert(self, ids, namespace):
        num_pages, window = len(ids) // PAGE, self.cache.window
        self.cache.evict(max(0, num_pages - self.pages.num_free))
        row = None
        if window is not None:
            self.cache.evict_window(max(0, num_pages - window.allocator.num_free))
            row = window.allocator.alloc(num_pages)
            if row is None:
                return
        pages = self.pages.alloc(num_pages)
        if pages is None:
            if row is not None:
                window.allocator.free(row)
            return
        for i, page in enumerate(pages):
            self.pools[0, page] = content(0, namespace, ids[: (i + 1) * PAGE])
            if row is not None:
                self.pools[1, row[i]] = content(1, namespace, ids[: (i + 1) * PAGE])
        if row is not None:  # the window has passed the first pages
            dead = max(0, num_pages - 3)
            window.allocator.free(row[:dead])
            row = np.concatenate([np.zeros(dead, np.int32), row[dead:]])
        result = self.cache.insert(np.array(ids, np.int32), pages, namespace, row)
        self.pages.free(result.duplicate_pages)
        if row is not None:
            window.allocator.free(result.duplicate_window_pages)

    def act(self, draw):
        kind = draw.random()
        if kind < 0.8:
            ids = [draw.randrange(2) for _ in range(draw.randrange(PAGE, 8 * PAGE))]
            self.insert(ids, draw.choice(NAMESPACES))
        elif kind < 0.9:
            self.cache.evict(draw.randrange(1, 20))
        elif kind < 0.98:
            self.cache.evict_window(draw.randrange(1, 10))
        else:
            self.cache.reset()

    def paths(self):
        """(namespace, tokens to the page's end) -> (page, window page or 0)."""
        found = {}
        for node in self.cache.tree.nodes():
            path = node.path()
            tokens = np.frombuffer(b"".join(n.tokens for n in path), np.int32).tolist()
            pages = np.frombuffer(node.pages, np.int32).tolist()
            windows = [0] * len(pages)
            if node.window_pages is not None:
                windows = np.frombuffer(node.window_pages, np.int32).tolist()
            start = len(tokens) // PAGE - len(pages)
            for i, pair in enumerate(zip(pages, windows, strict=True)):
                found[path[0].edge[0], tuple(tokens[: (start + i + 1) * PAGE])] = pair
        return found

    def check(self):
        """No page has wrong bytes, and the tree and the allocators agree."""
        for (namespace, tokens), (page, window) in self.paths().items():
            assert (self.pools[0, page] == content(0, namespace, tokens)).all()
            if window:
                assert (self.pools[1, window] == content(1, namespace, tokens)).all()
        found = audit(self.cache, [])
        assert found.violations == []
        assert sorted(found.pages) == self.pages.pages_in(2).tolist()
        if self.cache.window is not None:
            allocator = self.cache.window.allocator
            assert sorted(found.window_pages) == allocator.pages_in(2).tolist()
            assert len(allocator.pages_in(1)) == 0
        assert len(self.pages.pages_in(1)) == 0


def content(space, namespace, tokens):
    seed = zlib.crc32(repr((space, namespace, list(tokens))).encode())
    return np.random.default_rng(seed).integers(0, 256, ROW, np.uint8)


@pytest.mark.parametrize("has_window", [False, True])
def test_a_restart_finds_the_whole_tree(has_window):
    draw, engine = random.Random(has_window), Engine(has_window=has_window)
    for _ in range(25):
        for _ in range(draw.randrange(1, 30)):
            engine.act(draw)
        assert engine.journal.settle(20) and engine.journal.num_pending == 0
        before = engine.paths()
        engine.journal.close()
        engine = Engine(engine.memory.copy(), has_window)
        assert engine.paths() == before and engine.num_tokens == len(before) * PAGE
        engine.check()


@pytest.mark.parametrize("has_window", [False, True])
def test_a_kill_at_any_write_leaves_a_part_of_the_truth(has_window, monkeypatch):
    """The journal's thread is wherever it is, so that checksums of bytes are missing."""
    draw = random.Random(has_window)
    engine = Engine(has_window=has_window)
    crc32, num_found = zlib.crc32, 0
    for _ in range(120):
        left = draw.randrange(1, 120)

        def counted(*args):
            nonlocal left
            if threading.current_thread() is threading.main_thread():
                left -= 1
                if left == 0:
                    raise Killed
            return crc32(*args)

        with monkeypatch.context() as patch:
            patch.setattr("radixlm.warm_restart.journal.zlib.crc32", counted)
            with contextlib.suppress(Killed):
                while left > 0:
                    engine.act(draw)
            memory = engine.memory.copy()
        engine.journal.close()
        engine = Engine(memory, has_window)
        engine.check()
        num_found += len(engine.paths())
    assert num_found > 0


@pytest.mark.parametrize("has_window", [False, True])
def test_damage_is_a_miss(has_window):
    """About 6,700 flipped bits, anywhere in the journal and in the pools."""
    draw, engine = random.Random(5), Engine(has_window=has_window)
    for _ in range(60):
        engine.act(draw)
    assert engine.journal.settle(20)
    engine.journal.close()
    truth, num_lost = engine.paths(), 0
    used = np.flatnonzero(engine.memory)
    for _ in range(200):
        memory = engine.memory.copy()
        for _ in range(draw.choice((1, 2, 97))):
            at = draw.choice(used) if draw.random() < 0.8 else draw.randrange(len(memory))
            memory[at] ^= 1 << draw.randrange(8)
        found = Engine(memory, has_window)
        found.check()
        for path, (page, window) in found.paths().items():
            assert truth[path][0] == page and window in (0, truth[path][1])
        num_lost += len(truth) - len(found.paths())
        found.journal.close()
    assert num_lost > 0


def test_a_full_list_of_namespaces_leaves_out_the_rest(monkeypatch):
    monkeypatch.setattr("radixlm.warm_restart.journal.NAMES_BYTES", 512)
    engine = Engine()
    for i in range(9):
        engine.insert([i] * PAGE, CacheNamespace(cache_salt=f"{i}"))
    assert engine.journal.settle(20)
    found = Engine(engine.memory.copy())
    assert 0 < len(found.paths()) < 9
    engine.cache.reset()
    engine.insert([9] * PAGE, CacheNamespace(cache_salt="9"))
    assert engine.journal.settle(20)
    assert len(Engine(engine.memory.copy()).paths()) == 1


def test_a_tail_is_not_kept():
    engine = Engine()
    engine.insert([1] * PAGE, NAMESPACES[0])
    handle = engine.cache.match(np.array([1] * PAGE, np.int32), NAMESPACES[0]).handle
    page = engine.pages.alloc(1)
    assert engine.cache.insert_tail(handle, np.array([2], np.int32), page[0], NAMESPACES[0])
    assert engine.journal.settle(20)
    found = Engine(engine.memory.copy())
    assert [tokens for _, tokens in found.paths()] == [(1,) * PAGE]
