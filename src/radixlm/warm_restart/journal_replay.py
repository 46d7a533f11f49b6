"""What is whole in a page journal, put into a new radix tree: prefixes before what follows them.

A record counts if its checksum, the one before it, its namespace and the bytes of its page agree.
What follows a page that does not count is not found.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec
import numpy as np

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.memory.prefix.node import Node, page_ids
from radixlm.memory.prefix.radix import RadixCache
from radixlm.warm_restart.journal import HEAD_BYTES, IS_KNOWN, NO_PARENT, ROOT, PageJournal


class _Run(NamedTuple):
    """Pages under ``parent`` from ``first`` on, behind a page of checksum ``seed``."""

    parent: Node
    first: int
    namespace: CacheNamespace
    seed: int


class JournalReplay:
    """One replay of ``journal`` into ``cache``, which is empty."""

    def __init__(self, journal: PageJournal, cache: RadixCache) -> None:
        self._journal, self._cache = journal, cache
        self._names: dict[int, CacheNamespace | None] = {}
        self._ends = [0]  # of the names
        # lists, since single elements of arrays take long
        self._checksum: list[int] = journal.checksum.tolist()
        self._window: list[int] = journal.window.tolist()
        self._fields, self._width = journal.fields.tobytes(), journal.fields.strides[0]
        self._has_bytes: list[set[int]] = []  # by space: pages whose bytes are whole
        self._children: dict[int, list[int]] = {}
        self._taken = {0}  # window pages

    def run(self) -> int:
        """Tokens that are cached then. The journal then has records of just those."""
        numbers = np.flatnonzero(self._journal.checksum).astype(np.int32)
        is_own = (numbers > 0) & (self._journal.fields[numbers, 0] == numbers)
        numbers = numbers[is_own]
        parents = self._journal.fields[numbers, 1].tolist()
        for page, parent in zip(numbers.tolist(), parents, strict=True):
            self._children.setdefault(parent, []).append(page)
        self._hold(numbers)
        window = self._cache.window
        limits = (len(self._checksum), 0 if window is None else window.allocator.num_pages)
        self._has_bytes = [self._with_bytes(n, numbers, limit) for n, limit in enumerate(limits)]
        todo: list[_Run] = []
        for page in self._children.get(NO_PARENT, ()):
            if (namespace := self._name(int(self._journal.fields[page, 2]))) is not None:
                todo.append(_Run(self._cache.tree.root, page, namespace, ROOT))
        while todo:
            self._grow(todo.pop(), todo)
        self._prune()
        self._settle()
        return self._cache.total_pages * self._cache.page_size

    def _hold(self, numbers: PageIds) -> None:
        """Every page that the tree may take is held until then."""
        cache, none = self._cache, np.empty(0, np.int32)
        cache.allocator.rebuild(numbers, none)
        if cache.window is not None:
            allocator = cache.window.allocator
            pages = np.unique(self._journal.window[numbers])
            allocator.rebuild(pages[(pages > 0) & (pages < allocator.num_pages)], none)

    def _grow(self, run: _Run, todo: list[_Run]) -> None:
        """A node of the pages of a run, as long as one page follows the other and all or none have
        window pages; the runs that follow it."""
        pages: list[int] = []
        row: list[int] = []
        page, seed = run.first, run.seed
        following: list[int] = [page]
        while len(following) == 1:
            (page,) = following
            if not self._is_whole(page, seed, run.namespace):
                following = []
                break
            window = self._window_of(page)
            if row and bool(window) != bool(row[0]):
                break
            self._taken.add(window)
            pages.append(page)
            row.append(window)
            seed = self._checksum[page]
            following = self._children.get(page, [])
        if not pages:
            return
        ids = np.array(pages, np.int32)
        tokens = self._journal.fields[ids, 3:].reshape(-1)
        live = np.array(row, np.int32) if row[0] else None
        node = self._restore(run, tokens, ids, live)
        if node is not None:
            todo += [_Run(node, child, run.namespace, seed) for child in following]

    def _restore(
        self, run: _Run, ids: TokenIds, pages: PageIds, window_pages: PageIds | None
    ) -> Node | None:
        """A new leaf of held pages that hold ``ids`` since before the restart; None if one starts
        with the same page. A tombstone without ``window_pages``; see ``_prune``."""
        cache, parent = self._cache, run.parent
        head = ids[: cache.page_size].tobytes()
        if (head if parent.parent is not None else (run.namespace, head)) in parent.children:
            return None
        cache.allocator.adopt(pages)
        node = cache.tree.attach(parent, ids, pages, run.namespace)
        cache.queue.push(node)
        cache.total_pages += len(pages)
        if cache.window is not None and window_pages is not None:
            cache.window.put(node, window_pages)
        return node

    def _prune(self) -> None:
        """Free leaves that are tombstones, at which no prefix can end."""
        cache, freed = self._cache, list[bytes]()
        for node in list(cache.tree.nodes()) if cache.window is not None else ():
            if node.is_alive and not node.children and node.window_pages is None:
                cache.queue.discard(node)
                cache.remove(node, freed)
        cache.give_back(freed)

    def _is_whole(self, page: int, seed: int, namespace: CacheNamespace) -> bool:
        at = page * self._width
        record = self._fields[at : at + self._width]
        checksum = self._checksum[page]
        if (zlib.crc32(record, seed) or ROOT) != checksum or page not in self._has_bytes[0]:
            return False
        return self._name(int.from_bytes(record[8:12], "little", signed=True)) == namespace

    def _window_of(self, page: int) -> int:
        """The window page, 0 if there is none or its bytes are damaged."""
        window = self._cache.window
        found = self._window[page] if window is not None else 0
        if window is None or found in self._taken or not 0 < found < window.allocator.num_pages:
            return 0
        return found if page in self._has_bytes[1] else 0

    def _with_bytes(self, space: int, numbers: PageIds, limit: int) -> set[int]:
        """Which pages have the bytes of their checksum, themselves or in a window page below
        ``limit``."""
        journal = self._journal
        stored = journal.window[numbers] if space else numbers
        digests = journal.digests[space, numbers]
        is_known = (digests & IS_KNOWN != 0) & (stored > 0) & (stored < limit)
        pages = numbers[is_known]
        found = journal.digests_of(
            space, stored[is_known].tolist(), journal.checksum[pages].tolist()
        )
        is_whole = (np.array(found, np.int64) | IS_KNOWN) == digests[is_known]
        return set(pages[is_whole].tolist())

    def _name(self, place: int) -> CacheNamespace | None:
        """The namespace that stands at ``place``; None if it is damaged."""
        if place not in self._names:
            self._names[place] = None
            names = self._journal.names
            head = bytes(names[place : place + HEAD_BYTES]) if place >= 0 else b""
            end = place + HEAD_BYTES + int.from_bytes(head[:4], "little")
            body = bytes(names[place + HEAD_BYTES : end]) if head else b""
            if head and head[4:] == zlib.crc32(body).to_bytes(4, "little") and end <= len(names):
                self._names[place] = msgspec.msgpack.decode(body, type=CacheNamespace)
                self._ends.append(end)
        return self._names[place]

    def _settle(self) -> None:
        """Clear the records of what the tree did not take, and go on behind the known names."""
        journal, cache = self._journal, self._cache
        is_cached = np.zeros(len(journal.checksum), np.bool_)
        is_live = is_cached.copy()
        for node in cache.tree.nodes():
            is_cached[page_ids(node.pages)] = True
            is_live[page_ids(node.pages)] = node.window_pages is not None
        journal.checksum[~is_cached] = 0
        journal.window[~is_live] = 0
        none, cached = np.empty(0, np.int32), np.flatnonzero(is_cached).astype(np.int32)
        cache.allocator.rebuild(none, cached)
        if cache.window is not None:
            cache.window.allocator.rebuild(none, journal.window[is_live])
        journal.places = {name: at for at, name in self._names.items() if name is not None}
        journal.names_end = max(self._ends)
