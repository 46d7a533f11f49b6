"""The numbers of running requests that change with every token, as columns indexed by slot. A
decode step updates all of its rows with a few numpy calls; ``Request`` shows them as attributes.

tokens of a row   |---- stored in the request ----|-- recent (ring buffer) --|
                  |---------- sent to intake ----------|------ unsent ------|
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

RECENT = 64  # capacity of a row's ring buffer of recent tokens
_INITIAL_PAGES = 8
_NUM_COLUMNS = 11


class SlotTable:
    """One row a slot, and one more row of zeros that stands for requests without a slot.

    num_computed   tokens computed, including those of steps in flight
    num_committed  tokens computed by committed steps
    inflight       steps in flight
    num_tokens     tokens known: the prompt and the output so far
    num_sent       tokens that were sent to intake
    num_allocated  tokens that the row's pages can hold
    prompt_len     tokens before the output
    prefill_len    tokens to compute as prefill; the row decodes once it has computed them
    end            the row decodes while num_computed < end; 0 once the request has ended
    max_len        value of num_tokens at which the request ends
    check_at       value of num_tokens at which the request ends or its ring is full
    """

    def __init__(self, num_slots: int) -> None:
        columns = np.zeros((_NUM_COLUMNS, num_slots + 1), np.int64)
        (
            self.num_computed,
            self.num_committed,
            self.inflight,
            self.num_tokens,
            self.num_sent,
            self.num_allocated,
            self.prompt_len,
            self.prefill_len,
            self.end,
            self.max_len,
            self.check_at,
        ) = columns
        self.emit_interval: Int64Array = np.ones(num_slots + 1, np.int64)
        # the request wants log-probabilities or hidden states besides tokens
        self.needs_extras = np.zeros(num_slots + 1, np.bool_)
        # it runs, needs no extras and no feature follows its tokens: committed as a column
        self.is_fast_path = np.zeros(num_slots + 1, np.bool_)
        # a step may decode several of its tokens in turn
        self.goes_on = np.zeros(num_slots + 1, np.bool_)
        self.rids = np.full(num_slots + 1, "", np.object_)
        self.recent: Int32Array = np.zeros((num_slots + 1, RECENT), np.int32)
        self.pages: Int32Array = np.zeros((num_slots + 1, _INITIAL_PAGES), np.int32)
        # pages of the sliding-window layers, 0 where the window has passed
        self.window: Int32Array = np.zeros((num_slots + 1, _INITIAL_PAGES), np.int32)

    def freeze(self) -> SlotTable:
        """Make the columns that requests write read-only."""
        columns = self.num_computed, self.num_committed, self.inflight, self.num_tokens
        for column in (*columns, self.num_allocated):
            column.flags.writeable = False
        return self

    def reserve_pages(self, num_pages: int) -> None:
        """Grow the page columns so that a row can hold ``num_pages`` pages."""
        width = self.pages.shape[1]
        if num_pages > width:
            more = max(num_pages, 2 * width) - width
            self.pages = np.pad(self.pages, ((0, 0), (0, more)))
            self.window = np.pad(self.window, ((0, 0), (0, more)))

    def add_pages(self, slots: Int64Array, pages: Int32Array, page_size: int) -> Int64Array:
        """Append one page to each of the rows; the columns that they were written to."""
        columns = self.num_allocated[slots] // page_size
        self.reserve_pages(int(columns.max()) + 1)
        self.pages[slots, columns] = pages
        self.num_allocated[slots] += page_size
        return columns

    def append(self, slots: Int64Array, tokens: Int32Array) -> Int64Array:
        """Append one token to each of the rows; their new numbers of tokens."""
        num_tokens = self.num_tokens[slots]
        self.recent[slots, num_tokens % RECENT] = tokens
        num_tokens += 1
        self.num_tokens[slots] = num_tokens
        return num_tokens

    def append_runs(self, slots: Int64Array, counts: Int64Array, tokens: Int32Array) -> Int64Array:
        """Append ``counts[i]`` tokens to each row ``slots[i]``, fewer than its ring has room for;
        their new numbers of tokens. ``tokens``: of all rows, one after another."""
        num_tokens = self.num_tokens[slots]
        offsets = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = (np.repeat(num_tokens, counts) + offsets) % RECENT
        self.recent[np.repeat(slots, counts), places] = tokens
        num_tokens += counts
        self.num_tokens[slots] = num_tokens
        return num_tokens
