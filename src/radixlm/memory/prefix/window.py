"""Sliding windows: which pages a window still needs, and the tree's second page group.

    tokens     0 ......................... num_tokens
    full       [ every page is needed                ]
    window     [ null page 0  |  last window_tokens  ]
                              ^ first_live_page

Window layers never read a key that is ``window_tokens`` or more behind, so their pages can go while
the full group's stay. In the tree a node whose window pages have gone is a tombstone: a prefix may
still run through it, but not end within ``window_tokens`` behind it.
"""

from collections.abc import Callable

import numpy as np

from radixlm.base.errors import InvariantError
from radixlm.base.record import Record
from radixlm.memory.pages import NULL_PAGE, PageAllocator, PageIds
from radixlm.memory.prefix.evict import EvictionQueue, window_lru
from radixlm.memory.prefix.node import Node, page_ids
from radixlm.memory.prefix.tree import Step


class WindowTable(Record):
    """The arithmetic of one window over a request's row of window pages.

    Keeps the last ``window_tokens`` tokens before the next one to compute (holds for masks that
    count the query itself and those that do not), counted from the last whole page, so that the
    whole pages can always be handed to the prefix cache with a complete window.
    """

    window_tokens: int
    page_size: int

    def first_live_page(self, num_computed: int) -> int:
        """Index of the first page that tokens from position ``num_computed`` on still read.

        ``num_computed`` must not count tokens of a step that may yet be undone (drafts).
        """
        whole = num_computed // self.page_size * self.page_size
        return max(0, whole - self.window_tokens) // self.page_size

    def num_live_pages(self, num_computed: int, num_new: int = 0) -> int:
        """Window pages needed to compute ``num_new`` tokens behind ``num_computed``."""
        end = -(-(num_computed + num_new) // self.page_size)
        return end - self.first_live_page(num_computed)

    def take_dead(self, row: PageIds, num_computed: int, start_page: int = 0) -> PageIds:
        """Nulls what has left the window in ``row``; of that, the pages from ``start_page`` on.

        ``start_page`` is how many leading pages the prefix cache owns: those the cache frees.
        """
        stop = min(self.first_live_page(num_computed), len(row))
        passed = row[start_page:stop]
        dead: PageIds = passed[passed != NULL_PAGE]
        row[:stop] = NULL_PAGE
        return dead


class WindowGroup:
    """Window pages in the tree: which nodes are live, locked, next to become tombstones."""

    def __init__(self, allocator: PageAllocator, window_tokens: int) -> None:
        if window_tokens < 1:
            raise InvariantError(f"a window of {window_tokens} tokens")
        self.allocator = allocator
        self.window_tokens = window_tokens
        self.total_pages = 0
        self.num_locked = 0
        self.queue = EvictionQueue(window_lru)
        # told of nodes that become live (their window pages) and tombstones (None)
        self.on_change: Callable[[PageIds, PageIds | None], None] | None = None

    @property
    def num_evictable(self) -> int:
        """Window pages that ``RadixCache.evict_window`` can free."""
        return self.total_pages - self.num_locked

    @property
    def num_pages(self) -> int:
        """Whole pages that hold the last ``window_tokens`` tokens of a whole-page prefix."""
        return -(-self.window_tokens // self.allocator.page_size)

    def num_usable_steps(self, steps: list[Step]) -> int:
        """How many steps of a walk a match may take: it must end with a whole live window."""
        best = 0
        run = self.num_pages  # before the first token there is nothing to need
        for i, (node, num_pages) in enumerate(steps):
            run = run + num_pages if node.window_pages is not None else 0
            if run >= self.num_pages:
                best = i + 1
        return best

    def tail(self, node: Node) -> list[Node]:
        """The nodes, last first, that hold the window of the prefix ending at ``node``."""
        nodes: list[Node] = []
        missing = self.num_pages
        while node.parent is not None and missing > 0:
            nodes.append(node)
            missing -= node.num_pages
            node = node.parent
        return nodes

    def touch(self, node: Node, clock: int) -> None:
        """A match or an insert ended at ``node``."""
        for reader in self.tail(node):
            reader.window_access = clock

    def row(self, node: Node, num_pages: int) -> PageIds:
        """Window pages of the prefix ending at ``node``, [num_pages]; 0 before the window."""
        row = np.zeros(num_pages, np.int32)
        stop = num_pages
        start = max(0, num_pages - self.num_pages)
        for part in self.tail(node):
            begin = stop - part.num_pages
            if part.window_pages is not None:
                live = page_ids(part.window_pages)
                row[max(begin, start) : stop] = live[max(start - begin, 0) :]
            stop = begin
        return row

    def put(self, node: Node, pages: PageIds) -> None:
        """``node`` becomes live with the caller's ``pages``, which the tree owns from now on."""
        if node.num_window_locks:
            raise InvariantError(f"a tombstone has {node.num_window_locks} window locks")
        self.allocator.adopt(pages)
        node.window_pages = pages.tobytes()
        self.total_pages += len(pages)
        if self.on_change is not None:
            self.on_change(page_ids(node.pages), pages)
        self.queue.push(node)

    def revive(
        self, nodes: list[Node], row: PageIds, split: Callable[[Node, int], Node]
    ) -> PageIds:
        """Gives an inserter's window pages to tombstones on its path; those not needed."""
        duplicates: list[PageIds] = []
        start = 0
        for node in nodes:
            mine = row[start : start + node.num_pages]
            start += node.num_pages
            num_null = int((mine == NULL_PAGE).sum())
            if node.window_pages is not None:
                is_other = (mine != NULL_PAGE) & (mine != page_ids(node.window_pages))
                duplicates.append(mine[is_other])
            elif num_null < len(mine):
                if num_null:
                    split(node, num_null)
                self.put(node, mine[num_null:])
        return np.concatenate(duplicates) if duplicates else np.empty(0, np.int32)

    def clear(self, node: Node) -> int:
        """``node`` becomes a tombstone; its window pages are freed; how many."""
        if node.window_pages is None:
            return 0
        if node.num_window_locks:
            raise InvariantError(f"evicting a node with {node.num_window_locks} window locks")
        self.allocator.release(page_ids(node.window_pages))
        node.window_pages = None
        self.total_pages -= node.num_pages
        if self.on_change is not None:
            self.on_change(page_ids(node.pages), None)
        self.queue.discard(node)
        return node.num_pages

    def has_split(self, upper: Node) -> None:
        """``upper`` was cut off a node: both halves are live or neither is."""
        if upper.window_pages is not None and not upper.num_window_locks:
            self.queue.push(upper)

    def lock(self, node: Node, split: Callable[[Node, int], Node]) -> None:
        """Locks exactly the window before the end of ``node``.

        The node where the window begins is split there, so that ``unlock`` finds the same nodes
        whatever was split in between.
        """
        tail = self.tail(node)
        if any(part.window_pages is None for part in tail):
            raise InvariantError("locking a prefix whose window pages are gone")
        excess = sum(part.num_pages for part in tail) - self.num_pages
        if excess > 0:
            split(tail[-1], excess)
        for part in tail:
            part.num_window_locks += 1
            if part.num_window_locks == 1:
                self.num_locked += part.num_pages

    def unlock(self, node: Node) -> None:
        """Undoes one ``lock``."""
        for part in self.tail(node):
            if part.num_window_locks < 1:
                raise InvariantError("a window is unlocked more often than locked")
            part.num_window_locks -= 1
            if part.num_window_locks == 0:
                self.num_locked -= part.num_pages
                self.queue.push(part)

    def pop(self) -> Node | None:
        """The next node to lose its window pages, or None."""
        while (node := self.queue.pop()) is not None:
            if node.window_pages is not None and not node.num_window_locks:
                return node
        return None


def checked_row(row: PageIds) -> PageIds:
    """A row of window pages as it came, after a check that nulls stand only in front."""
    is_live = row != NULL_PAGE
    if is_live.any() and not is_live[int(is_live.argmax()) :].all():
        raise InvariantError("a row of window pages has a null page behind a live one")
    return row
