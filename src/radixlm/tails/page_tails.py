"""PageTails: prefix hits that go on behind whole pages.

Where a page of the prefix cache or of a running request has the next tokens, it is copied, and the
copy is the request's own.
"""

from __future__ import annotations

from radixlm.base.record import replace
from radixlm.memory.pages import NULL_PAGE
from radixlm.memory.prefix.base import Match, Tail
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.page_changes import FULL, WINDOW
from radixlm.scheduler.request import Request
from radixlm.step.plan import Int32Array, PageCopy


class PageTails:
    """Of one KVCacheManager, which has them from now on. ``min_tail``: the fewest tokens of a page
    that are worth a copy. States cannot be cut inside a page."""

    def __init__(self, kv_manager: KVCacheManager, min_tail: int) -> None:
        self._kv, self._min_tail = kv_manager, min_tail
        kv_manager.tails = self

    def find(self, request: Request, match: Match, limit: int) -> Tail | None:
        """The page that goes on longest behind the match, up to ``limit`` tokens of the request; of
        the prefix cache or of a running request, which puts its last page there only at its end."""
        start = match.num_tokens
        ids = request.ids[start : min(limit, start + self._kv.page_size - 1)]
        if len(ids) < self._min_tail:
            return None
        tail = self._kv.prefix_cache.find_tail(match.handle, ids, request.namespace, self._min_tail)
        for other in self._kv.requests:
            if other is None or other.handle is not match.handle:
                continue
            longest = tail.num_tokens if tail is not None else 0
            if other.namespace == request.namespace:
                tail = self._tail_of(other, start, ids, longest) or tail
        if tail is None:
            return None
        num_tokens = _before_span(request, start, tail.num_tokens)
        return replace(tail, num_tokens=num_tokens) if num_tokens >= self._min_tail else None

    def _tail_of(self, other: Request, start: int, ids: Int32Array, longest: int) -> Tail | None:
        """The page of a running request at ``start``, if more than ``longest`` of its committed
        tokens are those of ``ids``."""
        end = min(other.num_committed, other.share_limit, start + len(ids))
        if end - start <= longest or other.wire.embeds is not None:
            return None
        is_same = other.ids[start:end] == ids[: end - start]
        num_tokens = end - start if is_same.all() else int(is_same.argmin())
        column = start // self._kv.page_size
        window_page = int(other.window[column]) if self._kv.window is not None else None
        if num_tokens <= longest or window_page == NULL_PAGE:
            return None
        return Tail(int(other.pages[column]), num_tokens, window_page)

    def copy(self, request: Request, tail: Tail) -> None:
        """Give the request a page of its own with a copy of the tail.

        The tokens count as computed, and as committed when the step with the copy is."""
        column = request.num_allocated // self._kv.page_size
        end = request.num_computed + tail.num_tokens
        if not self._kv.allocate(request, end):
            return
        pages = [(FULL, tail.page, request.pages)]
        if tail.window_page is not None:
            pages.append((WINDOW, tail.window_page, request.window))
        for group, source, row in pages:
            copy = PageCopy(group, request.slot, source, int(row[column]))
            self._kv.changes.copies.append(copy)
        request.num_computed = end

    def insert(self, request: Request) -> bool:
        """Hand the page behind the inserted ones over to the prefix cache, with the tokens that
        fill it in part; whether the cache took it."""
        start = request.num_inserted
        end = min(request.num_committed, request.share_limit)
        if request.handle is None or request.wire.embeds is not None:
            return False
        if not self._min_tail <= end - start < self._kv.page_size:
            return False
        column = start // self._kv.page_size
        window_page = int(request.window[column]) if self._kv.window is not None else None
        if window_page == NULL_PAGE:
            return False
        page, ids = int(request.pages[column]), request.ids[start:end]
        return self._kv.prefix_cache.insert_tail(
            request.handle, ids, page, request.namespace, window_page
        )


def _before_span(request: Request, start: int, count: int) -> int:
    """How many of ``count`` tokens behind ``start`` a hit may have: it does not end inside a span
    of tokens that attend to each other."""
    for media in request.wire.media:
        for first, length in media.bidirectional_spans:
            if first < start + count < first + length:
                count = max(first - start, 0)
    return count
