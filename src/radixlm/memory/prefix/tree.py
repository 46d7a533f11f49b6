"""The shape of the radix tree, without any counters: walk, split, attach, detach."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import TokenIds
from radixlm.memory.prefix.node import TOKEN_BYTES, Edge, Node, count_common

Step = tuple[Node, int]
"""A node of a walk and how many of its pages the prompt shares (all, but perhaps of the last)."""


class Tree:
    """Nodes under one root; the first edge below the root carries the namespace."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(None, b"", b"", b"", 0)
        self._root_heads: dict[Hashable, list[bytes]] = {}  # by namespace
        self._num_nodes_made = 0

    @property
    def namespaces(self) -> list[Hashable]:
        """Those of which something is cached."""
        return list(self._root_heads)

    def walk(self, ids: TokenIds, namespace: Hashable) -> list[Step]:
        """The nodes along ``ids`` with the number of pages shared; changes nothing."""
        page_bytes = self.page_size * TOKEN_BYTES
        tokens = ids.tobytes()
        stop = len(tokens) // page_bytes * page_bytes
        steps: list[Step] = []
        node, start = self.root, 0
        while start < stop:
            head = tokens[start : start + page_bytes]
            child = node.children.get(head if start else (namespace, head))
            if child is None:
                break
            if not tokens.startswith(child.tokens, start):
                num_bytes = count_common(child.tokens, tokens, start)
                steps.append((child, num_bytes // page_bytes))
                break
            steps.append((child, child.num_pages))
            start += len(child.tokens)
            node = child
        return steps

    def split(self, node: Node, num_pages: int) -> Node:
        """Cuts the first ``num_pages`` pages off ``node`` as its new parent, which is returned."""
        self._num_nodes_made += 1
        return node.split(num_pages, self.page_size, self._num_nodes_made)

    def attach(self, parent: Node, tokens: TokenIds, pages: PageIds, namespace: Hashable) -> Node:
        """A new leaf below ``parent`` with copies of ``tokens`` and ``pages``."""
        data = tokens.tobytes()
        head = data[: self.page_size * TOKEN_BYTES]
        edge: Edge = head if parent.parent is not None else (namespace, head)
        self._num_nodes_made += 1
        node = Node(parent, edge, data, pages.tobytes(), self._num_nodes_made)
        parent.children[edge] = node
        if parent.parent is None:
            heads = self._root_heads.setdefault(namespace, [])
        elif parent.heads is None:
            heads = parent.heads = []
        else:
            heads = parent.heads
        heads.insert(bisect_left(heads, head), head)
        return node

    def detach(self, node: Node) -> Node:
        """Takes a leaf out; its former parent. Handles to it are dead from now on."""
        parent, edge = node.parent, node.edge
        assert parent is not None and not node.children
        del parent.children[edge]
        if isinstance(edge, tuple):
            heads = self._root_heads[edge[0]]
            del heads[bisect_left(heads, edge[1])]
            if not heads:
                del self._root_heads[edge[0]]
        elif parent.heads is not None:
            del parent.heads[bisect_left(parent.heads, edge)]
        node.is_alive = False
        return parent

    def nearest(self, parent: Node, tokens: bytes, namespace: Hashable) -> tuple[Node, int] | None:
        """The child whose first page shares the most tokens with ``tokens``, and how many; None if
        none shares one.

        Among sorted byte strings, one with the longest common start stands beside the place of
        ``tokens``.
        """
        is_root = parent.parent is None
        heads = self._root_heads.get(namespace) if is_root else parent.heads
        if not heads:
            return None
        at = bisect_left(heads, tokens)
        best, head = max(
            (count_common(head, tokens, 0), head) for head in heads[max(at - 1, 0) : at + 1]
        )
        edge: Edge = (namespace, head) if is_root else head
        return (parent.children[edge], best // TOKEN_BYTES) if best else None

    def is_tail(self, node: Node) -> bool:
        """Whether the node's tokens fill its only page in part."""
        return len(node.tokens) < self.page_size * TOKEN_BYTES

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
