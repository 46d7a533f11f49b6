"""A radix tree over the bytes of prompts: which workers have been sent which prefix."""

from __future__ import annotations

from collections import OrderedDict

NODE_BYTES = 600  # a node, its dict of children and its place in the order of use, measured
MAX_TEXT_BYTES = 1 << 20  # of a prompt; images in base64 would push out everything else


class Node:
    """``edge``: the bytes between the parent and this node. ``workers``: a bit for each worker that
    was sent the prefix that ends here; those of a child are a subset of its parent's."""

    __slots__ = ("children", "edge", "parent", "workers")

    def __init__(self, edge: bytes, parent: Node | None, workers: int = 0) -> None:
        self.edge, self.parent, self.workers = edge, parent, workers
        self.children: dict[int, Node] = {}  # by the first byte of their edges


class PrefixTree:
    """Bounded by ``max_bytes``, which counts texts and nodes; the least recently used leaf goes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._root = Node(b"", None)
        # Oldest first. A path is moved to the end from its leaf up, so that a parent is younger
        # than its children, and the oldest node is a leaf.
        self._used: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_nodes(self) -> int:
        """Nodes without the root."""
        return len(self._used)

    def path(self, text: bytes) -> list[Node]:
        """The nodes whose edges joined are ``text``; those that lacked are made."""
        node, at, path = self._root, 0, []
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = self._add(Node(text[at:], node))
            elif not text.startswith(child.edge, at):
                child = self._split(child, _common(child.edge, text, at))
            path.append(child)
            at += len(child.edge)
            node = child
        return path

    def mark(self, path: list[Node], workers: int) -> None:
        """The prefix of ``path`` was sent to ``workers``: it is the last to be forgotten."""
        for node in reversed(path):
            node.workers |= workers
            self._used.move_to_end(node)
        while self.num_bytes > self.max_bytes and self._used:
            oldest, _ = self._used.popitem(last=False)
            assert oldest.parent and not oldest.children
            del oldest.parent.children[oldest.edge[0]]
            self.num_bytes -= NODE_BYTES + len(oldest.edge)

    def forget(self, workers: int) -> None:
        """Clear bits of workers that have left."""
        for node in self._used:
            node.workers &= ~workers

    def _add(self, node: Node) -> Node:
        assert node.parent
        node.parent.children[node.edge[0]] = node
        self._used[node] = None
        self.num_bytes += NODE_BYTES + len(node.edge)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Put a node above ``node`` that has the first ``length`` bytes of its edge."""
        self.num_bytes -= length
        upper = self._add(Node(node.edge[:length], node.parent, node.workers))
        node.edge, node.parent = node.edge[length:], upper
        upper.children[node.edge[0]] = node
        return upper


def _common(edge: bytes, text: bytes, at: int) -> int:
    """How many first bytes of ``edge`` stand in ``text`` from ``at``: by bisection, since slices
    compare at the speed of memory."""
    low, high = 1, min(len(edge), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
