"""GroupedKVCacheManager: the KV cache of data-parallel attention, where each group of ranks has
pages and a prefix cache of its own.

Group g has slots [g * n, g * n + n) and its own numbers of pages. A request is given to a group
when it is admitted: to the one that pages were brought to for it, then to the one for which pages
of its prefix and pages that can be allocated are most together, then to the one with most empty
pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from radixlm.memory.prefix.base import Match, PrefixCache, TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.draft_pages import DraftPages
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array, SlotTable
from radixlm.step.plan import NewPages, PageCopy, PageUpdate


class _PrefixCaches:
    """What the queue and the planner ask about all caches."""

    def __init__(self, caches: Sequence[PrefixCache]) -> None:
        self._caches = caches

    def peek(self, ids: TokenIds, namespace: CacheNamespace) -> int:
        return max(cache.peek(ids, namespace) for cache in self._caches)

    def match(self, ids: TokenIds, namespace: CacheNamespace) -> Match:
        found = [cache.match(ids, namespace) for cache in self._caches]
        return max(found, key=lambda match: match.num_tokens)

    @property
    def num_locked(self) -> int:
        return sum(cache.num_locked for cache in self._caches)

    @property
    def num_evicted(self) -> int:
        return sum(cache.num_evicted for cache in self._caches)

    def reset(self) -> None:
        for cache in self._caches:
            cache.reset()


class GroupedKVCacheManager(KVCacheManager):
    """The managers of the groups, whose slots follow each other, as one."""

    def __init__(self, parts: Sequence[KVCacheManager]) -> None:
        first, num_slots = parts[0], sum(part.slots.num_total for part in parts)
        self._parts, self._per_group = tuple(parts), first.slots.num_total
        self.page_size, self.window, self.tails = first.page_size, first.window, first.tails
        self.table, self.requests = SlotTable(num_slots), [None] * num_slots
        for part in parts:
            part.table, part.requests = self.table, self.requests
        caches = _PrefixCaches([part.prefix_cache for part in parts])
        self.prefix_cache = caches  # type: ignore[assignment]  # the part of it that is asked for

    @property
    def parts(self) -> Sequence[KVCacheManager]:
        return self._parts

    def _of(self, request: Request) -> KVCacheManager:
        return self._parts[request.slot // self._per_group]

    def _split(self, slots: Int64Array) -> Iterator[tuple[KVCacheManager, Int64Array]]:
        """The slots of each group that has some."""
        groups = slots // self._per_group
        for group in np.unique(groups).tolist():
            yield self._parts[group], slots[groups == group]

    @property
    def num_available(self) -> int:
        return sum(part.num_available for part in self._parts)

    @property
    def num_total_tokens(self) -> int:
        return sum(part.num_total_tokens for part in self._parts)

    @property
    def num_used_tokens(self) -> int:
        return sum(part.num_used_tokens for part in self._parts)

    @property
    def cache_hit_rate(self) -> float:
        asked = sum(part.num_queried_tokens for part in self._parts)
        return sum(part.num_hit_tokens for part in self._parts) / max(1, asked)

    def shares_pages(self, first: Request, second: Request) -> bool:
        return self._of(first) is self._of(second)

    def take_changes(self) -> tuple[list[PageUpdate], NewPages | None, list[PageCopy]]:
        updates, news, copies = zip(*(part.take_changes() for part in self._parts), strict=True)
        found = [new for new in news if new is not None]
        new = None
        if found:
            columns = ([getattr(n, name) for n in found] for name in NewPages.__struct_fields__)
            new = NewPages(*map(np.concatenate, columns))
        return list(chain(*updates)), new, list(chain(*copies))

    def drop_changes(self, slot: int) -> None:
        self._parts[slot // self._per_group].drop_changes(slot)

    def admit(self, request: Request, spare_pages: int) -> bool:
        """``spare_pages``: of all groups, among which running requests are spread evenly."""
        limit = min(self.match_limit(request), request.share_limit)
        ids, spare = request.ids[:limit], -(-spare_pages // len(self._parts))
        chosen = self._parts[request.group] if request.group >= 0 else None

        def key(part: KVCacheManager) -> tuple[bool, tuple[int, int, int]]:
            return part is chosen, worth(part, ids, request.namespace)

        parts = sorted(self._parts, key=key, reverse=True)
        return any(part.admit(request, spare) for part in parts)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        return self._of(request).allocate(request, num_tokens)

    def allocate_next_page(self, slots: Int64Array) -> bool:
        return all(part.allocate_next_page(own) for part, own in self._split(slots))

    def trim(self, slots: Int64Array) -> None:
        for part, own in self._split(slots):
            part.trim(own)

    def restore_state(self, request: Request, start: int) -> None:
        self._of(request).restore_state(request, start)

    def drafts_of(self, request: Request) -> DraftPages:
        return self._of(request).drafts

    def insert(self, request: Request) -> None:
        self._of(request).insert(request)

    def free_out_of_window(self, request: Request) -> None:
        self._of(request).free_out_of_window(request)

    def free(self, request: Request) -> None:
        self._of(request).free(request)


def worth(part: KVCacheManager, ids: TokenIds, namespace: CacheNamespace) -> tuple[int, int, int]:
    """A request goes to the group of the largest. A hit counts like as many free pages: else all
    requests of one system prompt would go to one group until it is full. Of equal ones the group
    with more empty pages has the least to evict."""
    hit = part.prefix_cache.peek(ids, namespace) // part.page_size
    return hit + part.num_available, part.slots.num_free, part.pages.num_free
