"""Who is told of a prefix cache: two at once, or one of all that is cached already."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import CacheEvents, TokenIds
from radixlm.memory.prefix.node import Node, page_ids
from radixlm.memory.prefix.radix import RadixCache


class BothEvents:
    """Two that are told of the same cache."""

    def __init__(self, first: CacheEvents, second: CacheEvents) -> None:
        self._two = first, second

    def on_store(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> None:
        for one in self._two:
            one.on_store(pages, token_ids, parent_page, namespace)

    def on_remove(self, pages: PageIds) -> None:
        for one in self._two:
            one.on_remove(pages)

    def on_reset(self) -> None:
        for one in self._two:
            one.on_reset()


def describe(cache: RadixCache, events: CacheEvents) -> None:
    """Tell ``events`` of all that is cached, prefixes before what follows them."""
    events.on_reset()
    namespaces: dict[Node, Hashable] = {}
    for node in cache.tree.nodes():
        edge, parent = node.edge, node.parent
        assert parent is not None
        namespaces[node] = edge[0] if isinstance(edge, tuple) else namespaces[parent]
        if not cache.tree.is_tail(node):
            ids = np.frombuffer(node.tokens, np.int32)
            events.on_store(page_ids(node.pages), ids, parent.last_page, namespaces[node])
