"""What the tree forgets next: prefixes that are worth a copy elsewhere before their pages go."""

from collections.abc import Hashable
from itertools import accumulate
from typing import Final

import numpy as np

from radixlm.base.record import Record
from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle, TokenIds
from radixlm.memory.prefix.node import Node, join
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.prefix.window import WindowGroup

_MAX_NODES: Final = 256


class Prefix(Record):
    """A cached prefix with what it is of. ``ids``: int32, of its whole ``pages``; the first
    ``num_kept`` of them are in a tier, too."""

    handle: Handle
    namespace: Hashable
    ids: TokenIds
    pages: PageIds
    num_kept: int
    window_pages: PageIds | None = None


def next_evicted(cache: RadixCache, num_pages: int, num_window: int = 0) -> list[Prefix]:
    """The prefixes that ``evict`` and ``evict_window`` would take so many pages of, but those that
    ``mark_kept`` was told of; changes nothing."""
    tree, window = cache.tree, cache.window
    leaves = [n for n in cache.queue.first(_MAX_NODES) if not n.num_locks and not n.children]
    nodes = _enough(leaves, num_pages)
    if window is not None:
        live = [node for node in window.queue.first(_MAX_NODES) if not node.num_window_locks]
        nodes += _enough(live, num_window)
    # a tail has no key: it is kept with the page that it becomes
    ends = dict.fromkeys(node.parent if tree.is_tail(node) else node for node in nodes)
    return [_prefix(node, window) for node in ends if node is not None and _is_due(node, window)]


def mark_kept(cache: RadixCache, handle: Handle) -> None:
    """A tier has the prefix, too, which is locked."""
    assert isinstance(handle, Node)
    for node in [handle] if cache.window is not None else handle.path():
        node.is_kept = True


def _enough(nodes: list[Node], num_pages: int) -> list[Node]:
    """The first of ``nodes``, those that have so many pages together."""
    ends = accumulate(node.num_pages for node in nodes)
    return [node for node, end in zip(nodes, ends, strict=True) if end - node.num_pages < num_pages]


def _is_due(node: Node, window: WindowGroup | None) -> bool:
    """Whether the prefix that ends here is of use, and not kept yet."""
    if node.is_kept or node.parent is None:
        return False
    return window is None or all(part.window_pages is not None for part in window.tail(node))


def _prefix(node: Node, window: WindowGroup | None) -> Prefix:
    path = node.path()
    edge, pages = path[0].edge, join(step.pages for step in path)
    assert isinstance(edge, tuple), "a child of the root"
    ids = np.frombuffer(b"".join(step.tokens for step in path), np.int32)
    kept = max((i + 1 for i, step in enumerate(path) if step.is_kept), default=0)
    num_kept = sum(step.num_pages for step in path[:kept])
    row = window.row(node, len(pages)) if window is not None else None
    return Prefix(node, edge[0], ids, pages, num_kept, row)
