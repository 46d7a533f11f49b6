"""Pages that are copied to the tiers: which of them, and when.

Most policies copy when the prefix cache takes pages over. ``WriteBack`` copies what the prefix
cache would give up next, ahead of need: eviction waits for nothing, and what is not copied by then
is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.features.reserved_pages import ReservedPages
from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import Handle, TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.memory.prefix.radix import RadixCache
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.tiers.ahead import mark_kept, next_evicted
from radixlm.tiers.base import Command, Done, Put
from radixlm.tiers.keys import NO_KEY, page_keys
from radixlm.wire.transfer import Hint

AHEAD_SHARE: Final = 0.125  # of the pool: pages that are free or copied before others need them
_AHEAD_BYTES: Final = 32 << 20  # under way at once: they are locked meanwhile


class WritePolicy(Protocol):
    """Which pages go to the tiers, and when. ``is_ahead``: also those that are evicted soon."""

    is_ahead: bool = False

    def first_page(self, num_cached: int, num_put: int, num_pages: int) -> int | None:
        """Of a request whose first ``num_pages`` pages are in the prefix cache now, ``num_cached``
        of them found there when it was admitted, ``num_put`` kept before: the first page to keep;
        None to keep none now."""


class WriteThrough(WritePolicy):
    """Every page when it enters the prefix cache."""

    def first_page(self, num_cached: int, num_put: int, num_pages: int) -> int | None:
        return num_put


class WriteBack(WritePolicy):
    """Pages that the prefix cache would give up next."""

    is_ahead = True

    def first_page(self, num_cached: int, num_put: int, num_pages: int) -> int | None:
        return None


class PagePuts:
    """Of one scheduler. ``seed_of``: the seed of a namespace's keys; ``counts``: for metrics."""

    def __init__(
        self,
        kv_manager: KVCacheManager,
        reservations: ReservedPages,
        options: ArrivalOptions,
        policy: WritePolicy,
        send: Callable[[Command], None],
        next_job: Callable[[], int],
        seed_of: Callable[[CacheNamespace], bytes],
        counts: Counter[str],
    ) -> None:
        self._kv, self._options, self._policy = kv_manager, options, policy
        self._reservations = reservations
        self._send, self._next_job, self._seed_of = send, next_job, seed_of
        self._counts, self._size = counts, kv_manager.page_size
        self._under_way: dict[int, tuple[Handle, int]] = {}  # by job, with bytes
        self._bytes = 0
        self._ahead: set[int] = set()  # jobs that copy ahead
        self._next_look = 0  # on the prefix cache's clock

    def __len__(self) -> int:
        return len(self._under_way)

    def make(
        self,
        keys: Sequence[bytes],
        ids: TokenIds,
        first: int,
        pages: PageIds,
        window_pages: PageIds | None,
        hint: Hint | None = None,
    ) -> Put:
        """To keep those of a prefix's ``pages`` from ``first`` on. ``keys``, ``ids`` (tokens) and
        ``window_pages``: of the prefix from its start, or longer."""
        end, windows, row = len(pages), np.empty(0, np.intp), np.empty(0, np.int32)
        if window_pages is not None:
            live = window_pages[first:end]
            windows = np.flatnonzero(live)
            row = live[windows]
        return Put(
            self._next_job(),
            list(keys[first:end]),
            [keys[i - 1] if i else NO_KEY for i in range(first, end)],
            pages[first:].tobytes(),
            ids[first * self._size : end * self._size].tobytes(),
            tuple(windows.tolist()),
            row.tobytes(),
            hint,
        )

    def send(self, put: Put, handle: Handle) -> bool:
        """Have pages kept, which ``handle`` locks until then; False where too many wait."""
        full, window = self._options.page_bytes
        num_bytes = len(put.keys) * full + len(put.windows) * window
        if self._bytes and self._bytes + num_bytes > self._options.max_put_bytes:
            self._counts["dropped_tokens"] += len(put.keys) * self._size
            self._reservations.unpin(handle)
            return False
        self._under_way[put.job] = handle, num_bytes
        self._bytes += num_bytes
        self._send(put)
        return True

    def take(self, done: Done) -> bool:
        """Take a report; False if it is of another job."""
        if done.job not in self._under_way:
            return False
        handle, num_bytes = self._under_way.pop(done.job)
        self._bytes -= num_bytes
        if done.job in self._ahead:
            self._ahead.remove(done.job)
            mark_kept(self._cache, handle)
        self._reservations.unpin(handle)
        self._counts["kept_tokens"] += done.num_pages * self._size
        return True

    @property
    def _cache(self) -> RadixCache:
        cache = self._kv.prefix_cache
        assert isinstance(cache, RadixCache), "tiers need the radix tree"
        return cache

    def copy_ahead(self) -> None:
        """Copy what the prefix cache would give up next; to be called in each turn of the loop."""
        if not self._policy.is_ahead or self._ahead or self._cache.num_calls < self._next_look:
            return
        kv, room = self._kv, _AHEAD_BYTES
        num_full = int(AHEAD_SHARE * kv.pages.num_total) - kv.pages.num_free
        num_window = 0
        if kv.window is not None:
            pages = kv.window.pages
            num_window = int(AHEAD_SHARE * pages.num_total) - pages.num_free
        for prefix in next_evicted(self._cache, num_full, num_window):
            assert isinstance(prefix.namespace, CacheNamespace)
            keys = page_keys(prefix.ids, self._size, self._seed_of(prefix.namespace))
            put = self.make(keys, prefix.ids, prefix.num_kept, prefix.pages, prefix.window_pages)
            if not self.send(put, self._reservations.pin(prefix.handle)):
                return
            self._ahead.add(put.job)
            room -= self._under_way[put.job][1]
            if room <= 0:
                return
        self._next_look = self._cache.num_calls + 1
