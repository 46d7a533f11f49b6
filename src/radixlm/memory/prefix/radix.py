"""The radix tree: token prefixes in whole pages, each with the pages that hold its KV.

Behind whole pages stand tails, pages that are filled in part. A prompt that leaves a page or a tail
in its middle can have a copy of the rows that it shares, so that hits count tokens.

A node owns its pages until it is evicted. Locks count from the locked node up to the root, so the
unlocked nodes are closed downwards: whatever is unlocked can be evicted leaf by leaf, and
``num_evictable`` is a sum, not a search. Time is a counter of calls: the same calls, the same tree.
"""

from collections.abc import Hashable

import numpy as np
from numpy.typing import ArrayLike

from radixlm.base.errors import InvariantError
from radixlm.memory.pages import NULL_PAGE, PageAllocator, PageIds
from radixlm.memory.prefix.base import (
    CacheEvents,
    Handle,
    InsertResult,
    Match,
    PrefixCache,
    Tail,
    TokenIds,
)
from radixlm.memory.prefix.evict import EvictionQueue, policy
from radixlm.memory.prefix.node import Node, join, page_ids
from radixlm.memory.prefix.tree import Step, Tree
from radixlm.memory.prefix.window import WindowGroup, checked_row


class RadixCache(PrefixCache):
    """Prefix cache keyed by (namespace, token ids) at page granularity.

    ``allocator`` is the full group's. ``window`` is given for models with window layers: then each
    node also holds window pages, which are evicted on their own by ``evict_window``.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        eviction: str = "lru",
        *,
        window: WindowGroup | None = None,
        events: CacheEvents | None = None,
    ) -> None:
        groups = [allocator, window.allocator] if window is not None else [allocator]
        if any(group.page_size != page_size for group in groups):
            raise InvariantError(f"page size {page_size}, pools {[g.page_size for g in groups]}")
        self.page_size = page_size
        self.allocator = allocator
        self.window = window
        self.tree = Tree(page_size)
        self.total_pages = 0
        self.num_locked = 0
        self.num_evicted = 0
        self.events = events
        self.queue = EvictionQueue(policy(eviction))
        self._clock = 0

    @property
    def num_calls(self) -> int:
        """The logical clock, which the nodes' times of last use are of."""
        return self._clock

    @property
    def num_evictable(self) -> int:
        """Pages of unlocked nodes: all of them can be freed."""
        return self.total_pages - self.num_locked

    def match(self, ids: TokenIds, namespace: Hashable = None) -> Match:
        """Longest cached prefix of ``ids`` in whole pages; a use of it for the eviction order.

        Splits a node that is shared in part, so that the handle stands exactly at the end.
        """
        self._clock += 1
        nodes = self._ending(self._walk(_as_int32(ids), namespace))
        node = nodes[-1] if nodes else self.tree.root
        for step in nodes:
            step.num_hits += 1
            step.last_access = self._clock
        pages = join(step.pages for step in nodes)
        row = None
        if self.window is not None:
            self.window.touch(node, self._clock)
            row = self.window.row(node, len(pages))
        return Match(node, pages, len(pages) * self.page_size, row)

    def peek(self, ids: TokenIds, namespace: Hashable = None) -> int:
        """Tokens that ``match`` would find; changes nothing."""
        steps = self._walk(_as_int32(ids), namespace)
        return sum(num_pages for _, num_pages in steps) * self.page_size

    def lock(self, handle: Handle) -> None:
        """Keeps the prefix from eviction; its window too."""
        node = _alive(handle)
        if self.window is not None:
            self.window.lock(node, self._split)
        while node.parent is not None:
            if node.num_locks == 0:
                self.num_locked += node.num_pages
            node.num_locks += 1
            node = node.parent

    def unlock(self, handle: Handle, is_window_locked: bool = True) -> None:
        """Undoes one ``lock``; ``is_window_locked`` is False after ``unlock_window``."""
        node = _alive(handle)
        if node.parent is not None and node.num_locks < 1:
            raise InvariantError("a prefix is unlocked more often than locked")
        if self.window is not None and is_window_locked:
            self.window.unlock(node)
        while node.parent is not None:
            node.num_locks -= 1
            if node.num_locks == 0:
                self.num_locked -= node.num_pages
                if not node.children:
                    self.queue.push(node)
            node = node.parent

    def unlock_window(self, handle: Handle) -> None:
        """The request has computed a whole window past ``handle``: only the full pages stay."""
        if self.window is not None:
            self.window.unlock(_alive(handle))

    def insert(
        self,
        ids: TokenIds,
        pages: PageIds,
        namespace: Hashable = None,
        window_pages: PageIds | None = None,
    ) -> InsertResult:
        """Takes over the whole pages of ``ids``; see ``InsertResult`` for who owns what then.

        ids: int32 [num_tokens]; pages: int32, the request's page table from its start; what lies
        behind ``min(len(ids) // page_size, len(pages))`` pages is not looked at.
        window_pages: as ``pages`` (hybrid caches need it), 0 where the window has passed.
        """
        if (window_pages is None) != (self.window is None):
            raise InvariantError("window pages are given to caches with a window group, only")
        row = None if window_pages is None else checked_row(_as_int32(window_pages))
        ids, pages = _as_int32(ids), _as_int32(pages)
        num_pages = min(len(ids) // self.page_size, len(pages))
        ids, pages = ids[: num_pages * self.page_size], pages[:num_pages]
        self._clock += 1
        nodes = self._ending(self.tree.walk(ids, namespace))
        shared = join(node.pages for node in nodes)
        num_shared = len(shared)
        duplicates = pages[:num_shared][pages[:num_shared] != shared]
        row_duplicates = None
        if self.window is not None and row is not None:
            row_duplicates = self.window.revive(nodes, row, self._split)
        node = nodes[-1] if nodes else self.tree.root
        if num_shared < num_pages:
            node = self._grow(node, ids, pages, row, num_shared, namespace)
        tree_pages = np.concatenate([shared, pages[num_shared:]])
        tree_row = self._touch(node, num_pages)
        return InsertResult(
            node, num_pages, num_shared, tree_pages, duplicates, tree_row, row_duplicates
        )

    def find_tail(
        self, handle: Handle, ids: TokenIds, namespace: Hashable = None, at_least: int = 1
    ) -> Tail | None:
        """The page behind ``handle`` that starts with the most tokens of ``ids``, at least so many;
        counts as a use.

        ids: int32, less than a page. In a hybrid cache the page's window page must be there too.
        """
        found = self.tree.nearest(_alive(handle), _as_int32(ids).tobytes(), namespace)
        if found is None or found[1] < at_least:
            return None
        node, num_tokens = found
        if self.window is not None and node.window_pages is None:
            return None
        node.num_hits += 1
        node.last_access = node.window_access = self._clock
        page = int(page_ids(node.pages)[0])
        row = node.window_pages
        return Tail(page, num_tokens, None if row is None else int(page_ids(row)[0]))

    def insert_tail(
        self,
        handle: Handle,
        ids: TokenIds,
        page: int,
        namespace: Hashable = None,
        window_page: int | None = None,
    ) -> bool:
        """Takes over a page that ``ids``, the tokens behind ``handle``, fill in part.

        False, and nothing changed, if a page or a tail starts with all of them.
        """
        if not 0 < len(ids) < self.page_size:
            raise InvariantError(f"a tail of {len(ids)} tokens for pages of {self.page_size}")
        if (window_page is None) != (self.window is None):
            raise InvariantError("window pages are given to caches with a window group, only")
        parent, ids = _alive(handle), _as_int32(ids)
        found = self.tree.nearest(parent, ids.tobytes(), namespace)
        if found is not None and found[1] == len(ids):
            return False
        pages = np.array([page], np.int32)
        self.allocator.adopt(pages)
        node = self._attach(parent, ids, pages, namespace)
        node.last_access = self._clock
        self.queue.push(node)
        if self.window is not None and window_page is not None:
            node.window_access = self._clock
            self.window.put(node, np.array([window_page], np.int32))
        self.total_pages += 1
        if self.events is not None:
            self.events.on_store(pages, ids, parent.last_page, namespace)
        return True

    def evict(self, num_pages: int) -> int:
        """Frees at least ``num_pages`` pages, or all that are unlocked; returns how many.

        Without a window group exactly ``num_pages``: of the last leaf only the tail goes.
        """
        freed: list[bytes] = []
        num_freed = 0
        while num_freed < num_pages and (node := self.queue.pop()) is not None:
            if node.num_locks or node.children:
                continue
            excess = num_freed + node.num_pages - num_pages
            if excess > 0 and self.window is None:
                self._split(node, excess)
            num_freed += self.remove(node, freed)
        self.give_back(freed)
        self.num_evicted += num_freed
        return num_freed

    def evict_window(self, num_pages: int) -> int:
        """Frees at least ``num_pages`` window pages, or all that are unlocked; returns how many.

        Inner nodes become tombstones; a leaf is of no use as one, so its full pages go as well.
        """
        if self.window is None:
            return 0
        freed: list[bytes] = []
        before = self.window.allocator.num_free
        while (num_freed := self.window.allocator.num_free - before) < num_pages:
            node = self.window.pop()
            if node is None:
                break
            if node.children or node.num_locks:
                self.window.clear(node)
            else:
                self.num_evicted += self.remove(node, freed)
        self.give_back(freed)
        return num_freed

    @property
    def num_window_evictable(self) -> int:
        """Window pages that ``evict_window`` can free."""
        return self.window.num_evictable if self.window is not None else 0

    def reset(self) -> None:
        """Forgets everything; InvariantError while something is locked."""
        if self.num_locked:
            raise InvariantError(f"reset with {self.num_locked} of {self.total_pages} pages locked")
        self.evict(self.total_pages)
        if self.events is not None:
            self.events.on_reset()

    def _walk(self, ids: TokenIds, namespace: Hashable) -> list[Step]:
        """The steps along ``ids`` that a match may take."""
        steps = self.tree.walk(ids, namespace)
        if self.window is not None:
            del steps[self.window.num_usable_steps(steps) :]
        return steps

    def _ending(self, steps: list[Step]) -> list[Node]:
        """The nodes of ``steps``, the last one split where the steps end within it."""
        nodes = [node for node, _ in steps]
        if steps and steps[-1][1] < nodes[-1].num_pages:
            nodes[-1] = self._split(*steps[-1])
        return nodes

    def _touch(self, node: Node, num_pages: int) -> PageIds | None:
        """An insert ended at ``node``; its row of window pages, if there is such a group."""
        for step in node.path():
            step.last_access = self._clock
        if self.window is None:
            return None
        self.window.touch(node, self._clock)
        return self.window.row(node, num_pages)

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts ``num_pages`` pages off the front of ``node``; the new upper node."""
        upper = self.tree.split(node, num_pages)
        if self.window is not None:
            self.window.has_split(upper)
        return upper

    def _grow(
        self,
        parent: Node,
        ids: TokenIds,
        pages: PageIds,
        row: PageIds | None,
        start_page: int,
        namespace: Hashable,
    ) -> Node:
        """New nodes for the pages from ``start_page`` on; the last of them."""
        cut = start_page
        if row is not None:
            cut += int((row[start_page : len(pages)] == NULL_PAGE).sum())
        self.allocator.adopt(pages[start_page:])
        node = parent
        # Where the caller's window has passed, a tombstone goes before the live node.
        for begin, end in ((start_page, cut), (cut, len(pages))):
            if begin == end:
                continue
            tokens = ids[begin * self.page_size : end * self.page_size]
            node = self._attach(node, tokens, pages[begin:end], namespace)
            self.queue.push(node)
            if self.window is not None and row is not None and begin == cut:
                self.window.put(node, row[begin:end])
        self.total_pages += len(pages) - start_page
        if self.events is not None:
            self.events.on_store(
                pages[start_page:],
                ids[start_page * self.page_size :],
                parent.last_page,
                namespace,
            )
        return node

    def _attach(self, parent: Node, ids: TokenIds, pages: PageIds, namespace: Hashable) -> Node:
        """A new leaf below ``parent``; a tail that starts like it goes."""
        head = ids[: self.page_size].tobytes()
        found = self.tree.nearest(parent, head, namespace)
        node = self.tree.attach(parent, ids, pages, namespace)
        if found is not None and head.startswith(found[0].tokens):
            freed: list[bytes] = []
            self.queue.discard(found[0])
            self.remove(found[0], freed)
            self.give_back(freed)
        return node

    def remove(self, node: Node, freed: list[bytes]) -> int:
        """Takes an unlocked leaf out, and tombstones that become leaves by it; pages gone."""
        window, num_pages = self.window, 0
        while True:
            num_pages += node.num_pages
            freed.append(node.pages)
            if window is not None:
                window.clear(node)
                self.queue.discard(node)
            node = self.tree.detach(node)
            if node.parent is None or node.children or node.num_locks:
                return num_pages
            if window is None or node.window_pages is not None:
                self.queue.push(node)
                return num_pages

    def give_back(self, freed: list[bytes]) -> None:
        """Returns evicted pages to the allocator, all in one go."""
        pages = join(freed)
        self.allocator.release(pages)
        self.total_pages -= len(pages)
        if self.events is not None and len(pages):
            self.events.on_remove(pages)


def _as_int32(values: ArrayLike) -> PageIds:
    """A contiguous int32 array, the caller's own where it is one."""
    return np.ascontiguousarray(values, np.int32)


def _alive(handle: Handle) -> Node:
    """The node of a handle; InvariantError if it has been evicted."""
    if not isinstance(handle, Node) or not handle.is_alive:
        raise InvariantError("a handle was used after its prefix was evicted: lock it first")
    return handle
