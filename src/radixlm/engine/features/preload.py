"""Pages that come back before a prompt asks for them: after a start, while nothing else is to do,
those that a tier on disk took or gave last are brought into free pages of the KV cache. A prompt
that has them finds them there; whoever needs room gets theirs first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from radixlm.engine.features.reserved_pages import ReservedPages
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.step.plan import Int32Array
from radixlm.tiers.base import Admin, Arrived, Cancel, Command, Done, Get, Told

REST_S: Final = 0.5  # after the last request, before the next pages are brought
MAX_SHARE: Final = 0.5  # of the pool
_BLOCK: Final = 64  # pages that are brought in the order in which they were used
_NO_PAGES: Final = np.empty(0, np.int32)


class Preload:
    """Of one scheduler. ``max_pages``: at most so many, 0 for none; ``send`` begins a command, and
    ``next_job`` numbers it. ``counts``: for metrics."""

    def __init__(
        self,
        kv_manager: KVCacheManager,
        reservations: ReservedPages,
        max_pages: int,
        send: Callable[[Command], None],
        next_job: Callable[[], int],
        counts: Counter[str],
    ) -> None:
        self._free, self._reservations = kv_manager.pages, reservations
        self._send, self._next_job = send, next_job
        self._counts, self._size = counts, kv_manager.page_size
        max_pages = min(max_pages, int(MAX_SHARE * self._free.num_total))
        self._min_free = self._free.num_total - max_pages  # behind the last page that is brought
        self._wanted: list[bytes] = []
        self._keys: list[bytes] = []  # of the job under way
        self._pages: Int32Array = _NO_PAGES
        self._num_arrived = 0
        self._is_held, self._busy_s = False, -REST_S
        self._is_stopped = False
        self._job = next_job()
        self._is_told = not max_pages  # which pages there are
        if max_pages:
            send(Admin(self._job, "recent", {"count": max_pages}))

    @property
    def is_loading(self) -> bool:
        return bool(self._keys)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to bring."""
        return self._is_told and not self._wanted and not self._keys

    def tick(self, now_s: float, is_idle: bool) -> None:
        """Begin to bring pages, or go on, where nothing else is to do."""
        if not is_idle:
            self._busy_s = now_s
        if self._keys or not self._wanted or now_s - self._busy_s < REST_S:
            return
        count = min(len(self._wanted), self._free.num_free - self._min_free)
        reserved = self._reservations.reserve(count) if count > 0 else None
        if reserved is None:
            self._wanted = []  # what is served has filled the pool
            return
        self._keys, self._wanted = self._wanted[:count], self._wanted[count:]
        self._job, self._pages, self._num_arrived = self._next_job(), reserved[0], 0
        self._is_held = False
        self._send(Get(self._job, self._keys, self._pages.tobytes(), is_behind=True))

    def hold(self) -> None:
        """A request has come: its pages go first."""
        if self._keys and not self._is_held:
            self._is_held = True
            self._send(Cancel(self._job))

    def take(self, report: Told | Arrived | Done) -> bool:
        """Take a report; False if it is of another job."""
        if report.job != self._job:
            return False
        if isinstance(report, Told):
            self._is_told = True
            if not self._is_stopped:
                self._wanted = _last_first(report.data or [])
            return True
        first, end = self._num_arrived, report.num_pages
        self._reservations.keep_spare(self._keys[first:end], self._pages[first:end])
        self._num_arrived = end
        self._counts["preloaded_tokens"] += (end - first) * self._size
        if isinstance(report, Done):
            self._reservations.release(self._pages[end:])
            if not self._is_held:  # it came to the end, or to a page that is damaged
                end += _BLOCK
            if not self._is_stopped:
                self._wanted = self._keys[end:] + self._wanted
            self._keys, self._pages = [], _NO_PAGES
        return True

    def stop(self) -> None:
        """Bring no more, whatever is still reported."""
        self.hold()
        self._wanted, self._is_told, self._is_stopped = [], True, True


def _last_first(keys: list[bytes]) -> list[bytes]:
    """The last blocks of ``keys`` first; a block as it is: a prefix before what follows it."""
    ends = range(len(keys), 0, -_BLOCK)
    return [key for end in ends for key in keys[max(0, end - _BLOCK) : end]]
