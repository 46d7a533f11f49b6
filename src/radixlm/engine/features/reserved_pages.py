"""ReservedPages: pages and locks that no running request has, but pages on their way.

Pages that arrive are taken from the pool before their bytes come, and go to the prefix cache when
these have come. A prefix whose pages are being read, or that an arrival goes on from, is locked.
Spare are pages whose bytes came before a prompt asked for them: whoever needs room gets theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixlm.base.errors import InvariantError
from radixlm.memory.prefix.base import Handle, TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.page_changes import FULL, WINDOW
from radixlm.scheduler.reservations import Reservations
from radixlm.step.plan import Int32Array


class ReservedPages(Reservations):
    """Of one KVCacheManager, which counts them as its own from now on."""

    def __init__(self, kv_manager: KVCacheManager) -> None:
        super().__init__()
        self._kv, self._pages = kv_manager, kv_manager.pages
        self._prefix_cache, self._changes = kv_manager.prefix_cache, kv_manager.changes
        self._window = kv_manager.window.pages if kv_manager.window is not None else None
        self._spare: dict[bytes, int] = {}  # reserved pages by key
        kv_manager.reservations = self

    @property
    def num_pages(self) -> int:
        """Pages of the full table that are on their way."""
        return len(self.reserved) - len(self._spare)

    @property
    def num_spare(self) -> int:
        """Pages that came before anyone asked."""
        return len(self._spare)

    def free_spare(self, most: int) -> int:
        """Free up to ``most`` spare pages, the last to come first; how many."""
        spare = [self._spare.popitem()[1] for _ in range(min(most, len(self._spare)))]
        self.release(np.array(spare, np.int32))
        return len(spare)

    def keep_spare(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        """Reserved pages that hold what belongs to ``keys``, which no spare page has yet."""
        self._spare.update(zip(keys, pages.tolist(), strict=True))

    def count_spare(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have a spare page."""
        return next((i for i, key in enumerate(keys) if key not in self._spare), len(keys))

    def take_spare(self, keys: Sequence[bytes]) -> Int32Array:
        """The pages of leading keys, from now on the caller's: for ``insert_arrived``."""
        spare = keys[: self.count_spare(keys)]
        return np.array([self._spare.pop(key) for key in spare], np.int32)

    def reserve(
        self, num_pages: int, num_window: int = 0, num_left: int = 0
    ) -> tuple[Int32Array, Int32Array] | None:
        """Pages of both spaces, evicting from the prefix cache if need be; None, and none taken, if
        there are not enough, ``num_left`` of which are left to others. Steps that were launched
        before may still read them; the step that is planned copies none of them."""
        cache, window = self._prefix_cache, self._window
        if self.is_closed or num_pages + num_left > self._kv.num_available:
            return None
        if window is not None and num_window > window.num_free + cache.num_window_evictable:
            return None
        self._kv.make_room(num_pages)
        if window is not None and num_window > window.num_free:
            cache.evict_window(num_window - window.num_free)
        pages, row = self._pages.alloc(num_pages), np.empty(0, np.int32)
        if pages is not None and num_window:
            found = window.alloc(num_window) if window is not None else None
            if found is None:
                self._pages.free(pages)
                return None
            row = found
        if pages is None:
            return None
        if self._changes.copies_any(FULL, pages) or self._changes.copies_any(WINDOW, row):
            self._pages.free(pages)
            if window is not None:
                window.free(row)
            return None
        self.reserved.update(dict.fromkeys(pages.tolist()))
        self.window_reserved.update(dict.fromkeys(row.tolist()))
        return pages, row

    def insert_arrived(
        self,
        ids: TokenIds,
        cached: Int32Array,
        pages: Int32Array,
        namespace: CacheNamespace,
        window_pages: Int32Array | None = None,
    ) -> int:
        """Hand arrived pages over to the prefix cache; how many it took. Duplicates are freed.

        ids: the tokens of all pages from the start; cached: those of the prefix that was pinned;
        pages: the arrived ones behind it; window_pages: of the last of them."""
        row = None
        if self._window is not None:
            given = np.empty(0, np.int32) if window_pages is None else window_pages
            num_null = len(cached) + len(pages) - len(given)
            row = np.concatenate((np.zeros(num_null, np.int32), given))
            self._forget(self.window_reserved, given)
        self._forget(self.reserved, pages)
        result = self._prefix_cache.insert(ids, np.concatenate((cached, pages)), namespace, row)
        if self._window is not None and result.duplicate_window_pages is not None:
            self._window.free(result.duplicate_window_pages)
        self._pages.free(result.duplicate_pages)
        return len(pages) - len(result.duplicate_pages)

    def release(self, pages: Int32Array, window_pages: Int32Array | None = None) -> None:
        """Give reserved pages back that nothing came into."""
        self._forget(self.reserved, pages)
        self._pages.free(pages)
        if window_pages is not None and self._window is not None:
            self._forget(self.window_reserved, window_pages)
            self._window.free(window_pages)

    def pin(self, handle: Handle) -> Handle:
        """Lock a prefix until ``unpin``."""
        self._prefix_cache.lock(handle)
        self.pins.append(handle)
        return handle

    def unpin(self, handle: Handle) -> None:
        self.pins.remove(handle)
        self._prefix_cache.unlock(handle)

    def _forget(self, reserved: dict[int, None], pages: Int32Array) -> None:
        for page in pages.tolist():
            if page not in reserved:
                raise InvariantError(f"page {page} is not reserved")
            del reserved[page]
