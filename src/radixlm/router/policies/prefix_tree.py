"""A radix tree over the bytes of prompts: which workers have been sent which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

NODE_BYTES = 420  # a node, its place among its siblings and in the order of use, measured
PAGE_BYTES = 16  # prefixes are told apart by whole pages: few nodes, and few to pass


class Node:
    """``edge``: the bytes between the parent and this node. ``workers``: a bit for each worker that
    was sent the prefix that ends here; those of a child are a subset of its parent's."""

    __slots__ = ("children", "edge", "parent", "workers")

    def __init__(self, edge: bytes, parent: Node | None, workers: int = 0) -> None:
        self.edge, self.parent, self.workers = edge, parent, workers
        self.children: dict[bytes, Node] | None = None  # by the first page of their edges


class PrefixTree:
    """Bounded by ``max_bytes``, which counts texts and nodes; the least recently used leaf goes.
    Edges are whole pages of ``page_bytes``: what is left of a text at its end is not kept."""

    def __init__(self, max_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        self.max_bytes, self._page = max_bytes, page_bytes
        self.num_bytes = 0
        self._root = Node(b"", None)
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # the least recently used first

    def nodes(self) -> Iterator[Node]:
        """All, parents before their children; not the root."""
        waiting = list((self._root.children or {}).values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += (node.children or {}).values()

    def path(self, text: bytes, at: int = 0, size: int | None = None) -> list[Node]:
        """The nodes whose edges joined are the whole pages of ``size`` bytes of ``text`` from
        ``at`` on; those that lacked are made."""
        node, page = self._root, self._page
        path: list[Node] = []
        size = len(text) - at if size is None else size
        end = at + size - size % page
        while at < end:
            key = text[at : at + page]
            child = node.children.get(key) if node.children else None
            if child is None:
                child = Node(text[at:end], node)
                if node.children:
                    node.children[key] = child
                else:
                    node.children = {key: child}
                    self._leaves.pop(node, None)
                self._leaves[child] = None
                self.num_bytes += NODE_BYTES + end - at
                path.append(child)
                break
            edge = child.edge
            if not text.startswith(edge, at, end):
                length = _common(edge, text, at, end)
                child = self._split(child, length - length % page)
                edge = child.edge
            path.append(child)
            at += len(edge)
            node = child
        return path

    def mark(self, path: list[Node], workers: int) -> None:
        """The prefix of ``path`` was sent to ``workers``: it is the last to be forgotten."""
        for node in path:
            node.workers |= workers
        leaves = self._leaves
        if path and not path[-1].children:
            leaves.move_to_end(path[-1])
        while self.num_bytes > self.max_bytes and leaves:
            oldest, _ = leaves.popitem(last=False)
            parent = oldest.parent
            assert parent and parent.children and not oldest.children
            del parent.children[oldest.edge[: self._page]]
            self.num_bytes -= NODE_BYTES + len(oldest.edge)
            if not parent.children and parent is not self._root:
                leaves[parent] = None  # it was in use when its last child was, or before
                leaves.move_to_end(parent, last=False)

    def forget(self, workers: int) -> None:
        """Clear bits of workers that have left."""
        for node in self.nodes():
            node.workers &= ~workers

    def _split(self, node: Node, length: int) -> Node:
        """Put a node above ``node`` that has the first ``length`` bytes of its edge."""
        edge, page, parent = node.edge, self._page, node.parent
        assert parent and parent.children
        upper = Node(edge[:length], parent, node.workers)
        parent.children[edge[:page]] = upper
        node.edge, node.parent = edge[length:], upper
        upper.children = {node.edge[:page]: node}
        self.num_bytes += NODE_BYTES
        return upper


def _common(edge: bytes, text: bytes, at: int, end: int) -> int:
    """How many first bytes of ``edge`` stand in ``text`` from ``at`` to ``end``. Slices compare at
    the speed of memory, so the first that differ are looked for by doubling and halving."""
    low, high, step = 0, min(len(edge), end - at), 128
    while low + step < high and edge[low : low + step] == text[at + low : at + low + step]:
        low, step = low + step, step * 2
    high = min(high, low + step)
    while high - low > 256:
        middle = (low + high) // 2
        if edge[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle
    differ = int.from_bytes(edge[low:high], "big") ^ int.from_bytes(
        text[at + low : at + high], "big"
    )
    return high - (differ.bit_length() + 7) // 8
