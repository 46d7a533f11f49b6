"""What changes of running requests with every token, as columns by slot: a step that decodes
changes all of its rows by a few calls of numpy. ``Request`` shows the columns as attributes.

known tokens of a row   |---- stored with the request ----|-- recent, a ring --|
                        |------------ sent to intake ----------|---- fresh ----|
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from radixlm.scheduler.request import Request

Longs = NDArray[np.int64]
Ids = NDArray[np.int32]

RECENT = 64  # tokens of a row that may wait here until its request stores them
_FIRST_PAGES = 8
_COLUMNS = 10


class Rows:
    """The table; one row more than slots, all zeros: that of requests that have no slot.

    computed   tokens computed, those of steps in flight included
    done       those of committed steps
    inflight   steps in flight
    known      tokens known
    sent       tokens that intake knows
    room       tokens that the row's pages hold
    base       a row decodes from here on
    last       and up to here, not included; 0 once it has ended
    full_at    known tokens at which it ends
    look_at    known tokens at which that, or its ring, must be looked at
    """

    def __init__(self, num_slots: int) -> None:
        numbers = np.zeros((_COLUMNS, num_slots + 1), np.int64)
        (
            self.computed,
            self.done,
            self.inflight,
            self.known,
            self.sent,
            self.room,
            self.base,
            self.last,
            self.full_at,
            self.look_at,
        ) = numbers
        self.interval: Longs = np.ones(num_slots + 1, np.int64)
        self.asks_more = np.zeros(num_slots + 1, np.bool_)  # for more than tokens
        # it does not, no feature wants to know its tokens, and it has not ended
        self.is_plain = np.zeros(num_slots + 1, np.bool_)
        self.rids = np.full(num_slots + 1, "", np.object_)
        self.recent: Ids = np.zeros((num_slots + 1, RECENT), np.int32)
        self.pages: Ids = np.zeros((num_slots + 1, _FIRST_PAGES), np.int32)
        # of the window layers, 0 where passed
        self.window: Ids = np.zeros((num_slots + 1, _FIRST_PAGES), np.int32)
        self.requests: list[Request | None] = [None] * num_slots

    def freeze(self) -> Rows:
        """A table whose rows never change."""
        for column in (self.computed, self.done, self.inflight, self.known, self.room):
            column.flags.writeable = False
        return self

    def request(self, slot: int) -> Request:
        """Who has the slot."""
        found = self.requests[slot]
        assert found is not None, f"slot {slot} has no owner"
        return found

    def widen(self, num_pages: int) -> None:
        """Have room for so many pages in a row."""
        more = max(num_pages, 2 * self.pages.shape[1]) - self.pages.shape[1]
        if num_pages > self.pages.shape[1]:
            self.pages = np.pad(self.pages, ((0, 0), (0, more)))
            self.window = np.pad(self.window, ((0, 0), (0, more)))

    def add_pages(self, slots: Longs, pages: Ids, page_size: int) -> Longs:
        """A page more for each of the rows; the columns where they are."""
        columns = self.room[slots] // page_size
        self.widen(int(columns.max()) + 1)
        self.pages[slots, columns] = pages
        self.room[slots] += page_size
        return columns

    def append(self, slots: Longs, tokens: Ids) -> Longs:
        """One more token is known of each of the rows; how many are now."""
        known = self.known[slots]
        self.recent[slots, known % RECENT] = tokens
        known += 1
        self.known[slots] = known
        return known
