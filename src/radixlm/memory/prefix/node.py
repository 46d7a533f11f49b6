"""A node of the radix tree: a run of whole pages of tokens with the pages that hold their KV."""

from __future__ import annotations

from typing import Final

import numpy as np

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle, TokenIds

# The token bytes of a child's first page; under the root with the extra key before them. A dict
# compares the bytes themselves, so no hash collision can join two prefixes.
Edge = bytes | tuple[str | None, bytes]

NO_IDS: Final = np.empty(0, np.int32)


class Node(Handle):
    """Edge and node in one, as usual for a radix tree.

    tokens: int32 [len(pages) * page_size]; pages: int32 [num_pages].
    window_pages: int32 [num_pages], or None where the window group's pages are gone (a tombstone)
        or there is no window group. A node is live or a tombstone as a whole.
    num_locks counts locked handles at or below, num_window_locks those whose window reaches here.
    last_access, window_access: logical clock of the last use.
    """

    __slots__ = (
        "children",
        "edge",
        "is_alive",
        "last_access",
        "num_hits",
        "num_locks",
        "num_window_locks",
        "pages",
        "parent",
        "serial",
        "tokens",
        "window_access",
        "window_pages",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: Edge,
        tokens: TokenIds,
        pages: PageIds,
        serial: int,
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.tokens = tokens
        self.pages = pages
        self.serial = serial
        self.children: dict[Edge, Node] = {}
        self.window_pages: PageIds | None = None
        self.num_locks = 0
        self.num_window_locks = 0
        self.num_hits = 0
        self.last_access = 0
        self.window_access = 0
        self.is_alive = True

    def split(self, num_pages: int, page_size: int, serial: int) -> Node:
        """Cuts off the first ``num_pages`` pages as a new parent and returns it.

        The lower part stays this object: handles to it stay good, and its locks hold the new
        parent too, hence the copied counts. The arrays stay views of one buffer.
        """
        assert self.parent is not None and 0 < num_pages < len(self.pages)
        cut = num_pages * page_size
        upper = Node(self.parent, self.edge, self.tokens[:cut], self.pages[:num_pages], serial)
        if self.window_pages is not None:
            upper.window_pages = self.window_pages[:num_pages]
            self.window_pages = self.window_pages[num_pages:]
        upper.num_locks = self.num_locks
        upper.num_window_locks = self.num_window_locks
        upper.num_hits = self.num_hits
        upper.last_access = self.last_access
        upper.window_access = self.window_access
        self.tokens = self.tokens[cut:]
        self.pages = self.pages[num_pages:]
        self.parent.children[self.edge] = upper
        self.edge = self.tokens[:page_size].tobytes()
        self.parent = upper
        upper.children[self.edge] = self
        return upper

    def own_arrays(self) -> None:
        """Copies the arrays, so that a short node does not keep a long prompt's buffer alive."""
        self.tokens = self.tokens.copy()
        self.pages = self.pages.copy()
        if self.window_pages is not None:
            self.window_pages = self.window_pages.copy()

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def count_common(a: TokenIds, b: TokenIds) -> int:
    """Length of the common prefix of two token runs, in tokens."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    is_different = a[:n] != b[:n]
    first = int(is_different.argmax())
    return first if is_different[first] else n


def join(parts: list[PageIds]) -> PageIds:
    """One array of all parts, always a copy that the caller may keep."""
    return np.concatenate(parts) if parts else NO_IDS.copy()
