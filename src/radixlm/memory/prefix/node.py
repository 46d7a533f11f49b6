"""A node of the radix tree: a run of whole pages of tokens with the pages that hold their KV, or
a tail: one page that its tokens fill in part."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

import numpy as np

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle

# The token bytes of a child's first page (fewer for a tail); under the root with the namespace
# before them. A dict compares the bytes themselves, so no hash collision can join two prefixes.
Edge = bytes | tuple[Hashable, bytes]

TOKEN_BYTES: Final = 4
PAGE_ID_BYTES: Final = 4


class Node(Handle):
    """Edge and node in one, as usual for a radix tree.

    tokens: bytes of int32 [num_pages * page_size]; pages: bytes of int32 [num_pages]. Bytes, since
        a tree has many nodes: they compare in one call and are freed thrice as fast as arrays.
        A tail is a leaf with one page and fewer tokens. Nobody locks it.
    heads: the children's edges without namespaces, in order; None at the root (see ``Tree``).
    window_pages: as ``pages``, or None where the window group's pages are gone (a tombstone) or
        there is no window group. A node is live or a tombstone as a whole.
    num_locks counts locked handles at or below, num_window_locks those whose window reaches here.
    is_kept: a tier has the prefix that ends here, too, with its window.
    last_access, window_access: logical clock of the last use.
    """

    __slots__ = (
        "children",
        "edge",
        "heads",
        "is_alive",
        "is_kept",
        "last_access",
        "num_hits",
        "num_locks",
        "num_pages",
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
        tokens: bytes,
        pages: bytes,
        serial: int,
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.tokens = tokens
        self.pages = pages
        self.num_pages = len(pages) // PAGE_ID_BYTES
        self.serial = serial
        self.children: dict[Edge, Node] = {}
        self.heads: list[bytes] | None = None
        self.window_pages: bytes | None = None
        self.num_locks = 0
        self.num_window_locks = 0
        self.num_hits = 0
        self.last_access = 0
        self.window_access = 0
        self.is_alive = True
        self.is_kept = False

    def split(self, num_pages: int, page_size: int, serial: int) -> Node:
        """Cuts off the first ``num_pages`` pages as a new parent and returns it.

        The lower part stays this object: handles to it stay good, and its locks hold the new
        parent too, hence the copied counts.
        """
        assert self.parent is not None and 0 < num_pages < self.num_pages
        cut = num_pages * page_size * TOKEN_BYTES
        page_cut = num_pages * PAGE_ID_BYTES
        upper = Node(self.parent, self.edge, self.tokens[:cut], self.pages[:page_cut], serial)
        upper.is_kept = self.is_kept and self.window_pages is None
        if self.window_pages is not None:
            upper.window_pages = self.window_pages[:page_cut]
            self.window_pages = self.window_pages[page_cut:]
        upper.num_locks = self.num_locks
        upper.num_window_locks = self.num_window_locks
        upper.num_hits = self.num_hits
        upper.last_access = self.last_access
        upper.window_access = self.window_access
        self.tokens = self.tokens[cut:]
        self.pages = self.pages[page_cut:]
        self.num_pages -= num_pages
        self.parent.children[self.edge] = upper
        self.edge = self.tokens[: page_size * TOKEN_BYTES]
        self.parent = upper
        upper.children[self.edge] = self
        upper.heads = [self.edge]
        return upper

    @property
    def last_page(self) -> int | None:
        """The last page of the prefix that ends here; None at the root."""
        return int(page_ids(self.pages)[-1]) if self.parent is not None else None

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def count_common(a: bytes, b: bytes, b_start: int) -> int:
    """Bytes of whole tokens that ``a`` and ``b[b_start:]`` have in common at their start."""
    n = min(len(a), len(b) - b_start) // TOKEN_BYTES
    if n == 0:
        return 0
    is_different = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n, b_start)
    first = int(is_different.argmax())
    return (first if is_different[first] else n) * TOKEN_BYTES


def page_ids(pages: bytes) -> PageIds:
    """A node's pages as an array, read-only and not copied."""
    return np.frombuffer(pages, np.int32)


def join(parts: Iterable[bytes]) -> PageIds:
    """One array of the pages of several nodes, a copy that the caller may keep and change."""
    return np.frombuffer(bytearray().join(parts), np.int32)
