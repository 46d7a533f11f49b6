"""PublishedPages: the prefix cache's changes as KV events, with the hashes of SGLang's page chain.

The scheduler's thread copies a change into the publisher's queue; the publisher's thread hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from radixlm.kv_events.publisher import (
    Cleared,
    Event,
    KvEventPublisher,
    PageGroup,
    Removed,
    Stored,
)
from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import CacheEvents, TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.tiers.keys import REFERENCE_SEED, dynamo_hash, event_hash, page_keys, reference_seed

_OWN_SEED: Final = b"radixlm-kv-events-v1"
_MAX_ID: Final = (1 << 63) - 1
_PLAIN: Final = CacheNamespace()


class PublishedPages:
    """Told of one prefix cache's changes (``CacheEvents``). Tails, which no router can count on,
    are left out. ``adapter_names``: of the adapters' digests; ``describe`` tells of all that is
    cached."""

    def __init__(
        self,
        publisher: KvEventPublisher,
        page_size: int,
        adapter_names: Mapping[str, str],
        describe: Callable[[CacheEvents], None],
    ) -> None:
        """Subscribers are told first that nothing is cached."""
        self._publisher, self._page_size = publisher, page_size
        self._hashes = _PageHashes(page_size, adapter_names, publisher.options.format == "dynamo")
        self._is_behind = False
        self._describe = describe
        publisher.put(self._hashes.clear)

    def on_store(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> None:
        if len(token_ids) >= self._page_size and self._is_up_to_date():
            self._publisher.put(self._stored(pages, token_ids, parent_page, namespace))

    def on_remove(self, pages: PageIds) -> None:
        if self._is_up_to_date():
            self._publisher.put(partial(self._hashes.remove, pages.tobytes()))

    def on_reset(self) -> None:
        self._is_behind = False
        self._publisher.put(self._hashes.clear)

    def _is_up_to_date(self) -> bool:
        """False while the publisher is behind by too many changes, which are dropped. When it has
        room again it is told of the whole cache, which holds the current change too."""
        if not self._publisher.has_room:
            self._is_behind = True
        elif self._is_behind:
            self.refresh()
            return False
        return not self._is_behind

    def refresh(self) -> None:
        """Publish AllBlocksCleared and the whole cache, if there is room for it; else as soon as
        there is."""
        self._is_behind = not self._publisher.has_room
        if not self._is_behind:
            whole = _Collected(self)
            self._describe(whole)
            self._publisher.put(whole)

    def _stored(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> partial[Sequence[Event]]:
        assert isinstance(namespace, CacheNamespace | None)
        data = pages.tobytes(), token_ids.tobytes()
        return partial(self._hashes.store, *data, parent_page, namespace or _PLAIN)


class _Collected:
    """The description of a whole cache as one change."""

    def __init__(self, pages: PublishedPages) -> None:
        self._pages = pages
        self._changes: list[partial[Sequence[Event]]] = []

    def on_store(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> None:
        self._changes.append(self._pages._stored(pages, token_ids, parent_page, namespace))

    def on_remove(self, pages: PageIds) -> None:
        raise NotImplementedError("a cache that describes itself removes nothing")

    def on_reset(self) -> None:
        self._changes.append(partial(self._pages._hashes.clear))

    def __call__(self) -> Sequence[Event]:
        return [event for change in self._changes for event in change()]


class _PageHashes:
    """The key and the published hash of each cached page; in the publisher's thread."""

    def __init__(self, page_size: int, names: Mapping[str, str], is_dynamo: bool) -> None:
        self._page_size, self._names, self._is_dynamo = page_size, names, is_dynamo
        self._of_page: dict[int, tuple[bytes, int]] = {}

    def store(
        self, pages: bytes, tokens: bytes, parent: int | None, namespace: CacheNamespace
    ) -> Sequence[Event]:
        ids = np.frombuffer(tokens, np.int32)
        key, above = _seed(namespace), None
        if parent is not None:
            key, above = self._of_page[parent]
        keys = page_keys(ids, self._page_size, key)
        hashes = [event_hash(key) for key in keys]
        if self._is_dynamo:
            names = namespace.extra_key, namespace.cache_salt
            hashes = [dynamo_hash(key, *names) for key in keys]
        numbers = np.frombuffer(pages, np.int32).tolist()
        self._of_page.update(zip(numbers, zip(keys, hashes, strict=True), strict=True))
        return [Stored(tuple(hashes), above, tokens, self._group(namespace))]

    def remove(self, pages: bytes) -> Sequence[Event]:
        gone = [self._of_page.pop(page, None) for page in np.frombuffer(pages, np.int32).tolist()]
        hashes = tuple(found[1] for found in gone if found is not None)
        return [Removed(hashes)] if hashes else []

    def clear(self) -> Sequence[Event]:
        self._of_page.clear()
        return [Cleared()]

    def _group(self, namespace: CacheNamespace) -> PageGroup:
        digest = namespace.adapter
        name = self._names.get(digest, digest) if digest is not None else None
        number = int(digest[:16], 16) & _MAX_ID if digest is not None else None
        return PageGroup(name, number, namespace.cache_salt, namespace.extra_key)


def _seed(namespace: CacheNamespace) -> bytes:
    """The seed of the chain: SGLang's where only extra_key and cache_salt are set, and unlike any
    of those where KV depends on more, so that no two pages have one hash."""
    texts = namespace.extra_key, namespace.cache_salt
    seed = reference_seed(REFERENCE_SEED, texts) if texts != (None, None) else b""
    own = namespace.adapter, namespace.tenant, namespace.rope_variant
    media = tuple(digest.hex() for digest in namespace.earlier_media)
    if own == (None, None, None) and not media:
        return seed
    return reference_seed(_OWN_SEED + seed, (*own, *media))
