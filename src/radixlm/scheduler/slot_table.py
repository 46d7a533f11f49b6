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

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

RECENT = 64  # tokens of a row that may wait here until its request stores them
_FIRST_PAGES = 8
_COLUMNS = 10


class SlotTable:
    """The table; one row more than slots, all zeros: that of requests that have no slot.

    computed   tokens computed, those of steps in flight included
    done       those of committed steps
    inflight   steps in flight
    known      tokens known
    sent       tokens that intake knows
    room       tokens that the row's pages hold
    base       a row decodes from here on
    last       and up to here, not included; 0 once it has ended
    max_len    known tokens at which it ends
    check_at    known tokens at which that, or its ring, must be looked at
    """

    def __init__(self, num_slots: int) -> None:
        numbers = np.zeros((_COLUMNS, num_slots + 1), np.int64)
        (
            self.num_computed,
            self.num_committed,
            self.inflight,
            self.num_tokens,
            self.num_sent,
            self.num_allocated,
            self.prefill_len,
            self.end,
            self.max_len,
            self.check_at,
        ) = numbers
        self.emit_interval: Int64Array = np.ones(num_slots + 1, np.int64)
        self.needs_extras = np.zeros(num_slots + 1, np.bool_)  # for more than tokens
        # it does not, no feature wants to know its tokens, and it has not ended
        self.is_fast_path = np.zeros(num_slots + 1, np.bool_)
        self.rids = np.full(num_slots + 1, "", np.object_)
        self.recent: Int32Array = np.zeros((num_slots + 1, RECENT), np.int32)
        self.pages: Int32Array = np.zeros((num_slots + 1, _FIRST_PAGES), np.int32)
        # of the window layers, 0 where passed
        self.window: Int32Array = np.zeros((num_slots + 1, _FIRST_PAGES), np.int32)
        self.requests: list[Request | None] = [None] * num_slots

    def freeze(self) -> SlotTable:
        """A table whose rows never change."""
        for column in (
            self.num_computed,
            self.num_committed,
            self.inflight,
            self.num_tokens,
            self.num_allocated,
        ):
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

    def add_pages(self, slots: Int64Array, pages: Int32Array, page_size: int) -> Int64Array:
        """A page more for each of the rows; the columns where they are."""
        columns = self.num_allocated[slots] // page_size
        self.widen(int(columns.max()) + 1)
        self.pages[slots, columns] = pages
        self.num_allocated[slots] += page_size
        return columns

    def append(self, slots: Int64Array, tokens: Int32Array) -> Int64Array:
        """One more token is known of each of the rows; how many are now."""
        known = self.num_tokens[slots]
        self.recent[slots, known % RECENT] = tokens
        known += 1
        self.num_tokens[slots] = known
        return known
