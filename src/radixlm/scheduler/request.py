"""Request: what scheduling needs to know of one sequence, and nothing of any feature.

             prompt_len        num_known
ids  |---- prompt ----|-- output --|
     |--- cached ---|--- computed ---|        computed counts steps in flight,
                                              done only the committed ones

What changes with each token stands in the columns of ``Rows`` while the request has a slot.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from radixlm.memory.prefix.base import Handle
from radixlm.scheduler.rows import RECENT, Rows
from radixlm.step.plan import Ids
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest

_WAITING = Rows(0).freeze()


class Column:
    """An attribute of a request that is a place in a column of its table."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, request: None, owner: Any = None) -> Column: ...
    @overload
    def __get__(self, request: Request, owner: Any = None) -> int: ...
    def __get__(self, request: Request | None, owner: Any = None) -> int | Column:
        if request is None:
            return self
        value: int = getattr(request.rows, self._name).item(request.slot)
        return value

    def __set__(self, request: Request, value: int) -> None:
        getattr(request.rows, self._name)[request.slot] = value


class Request:
    """One sequence from arrival to release. Owned and mutated by the scheduler alone."""

    __slots__ = (
        "_ids",
        "_num_sent",
        "_num_stored",
        "base",
        "finish",
        "full_at",
        "handle",
        "inserted",
        "interval",
        "is_followed",
        "is_window_locked",
        "key",
        "max_new",
        "min_new",
        "num_cached",
        "prompt_len",
        "queued_s",
        "retractions",
        "rid",
        "rows",
        "share_limit",
        "slot",
        "started_s",
        "stop_ids",
        "wire",
    )

    computed = Column()
    done = Column()
    inflight = Column()
    room = Column()  # tokens that its pages hold

    def __init__(
        self,
        wire: TokenizedRequest,
        stop_ids: frozenset[int],
        key: str | None,
        share_limit: int = 1 << 62,
    ) -> None:
        self._ids = np.array(wire.ids(), dtype=np.int32)
        self.wire, self.rid, self.stop_ids, self.key = wire, wire.rid, stop_ids, key
        self.max_new = wire.sampling.max_new_tokens or 0
        self.min_new = wire.sampling.min_new_tokens
        self._num_stored = self._num_sent = len(self._ids)
        self.prompt_len = len(self._ids) - wire.num_emitted
        self.base = len(self._ids)  # tokens to compute before the next new one
        self.num_cached = 0
        self.share_limit = share_limit  # tokens from here on are never put into the tree
        self.inserted = 0  # tokens that the prefix tree holds for this request
        self.rows, self.slot = _WAITING, -1
        self.is_window_locked = True
        self.handle: Handle | None = None
        self.finish: Finish | None = None
        self.retractions = 0
        self.queued_s = wire.arrival_s
        self.started_s = 0.0
        # set on arrival: known tokens at which it ends, tokens between two deltas, and whether a
        # feature wants to know its tokens
        self.full_at, self.interval, self.is_followed = 0, 1, False

    # ---- tokens ----------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        return self._num_stored if self.slot < 0 else self.rows.known.item(self.slot)

    @property
    def ids(self) -> Ids:
        """All known tokens (a view)."""
        num_known = self.num_known
        if num_known > self._num_stored:
            self.store()
        return self._ids[:num_known]

    @property
    def output_ids(self) -> Ids:
        return self.ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return self.num_known - self.prompt_len

    @property
    def num_fresh(self) -> int:
        """Tokens that intake does not know."""
        return self.num_known - self.num_sent

    @property
    def num_sent(self) -> int:
        return self._num_sent if self.slot < 0 else self.rows.sent.item(self.slot)

    def take_fresh(self) -> list[int]:
        """Tokens that intake does not know; it will."""
        fresh: list[int] = self.ids[self.num_sent :].tolist()
        self._num_sent = self.num_known
        if self.slot >= 0:
            self.rows.sent[self.slot] = self._num_sent
        return fresh

    def append(self, token: int) -> None:
        """One more token of a running request is known."""
        rows, slot, known = self.rows, self.slot, self.num_known
        rows.recent[slot, known % RECENT] = token
        rows.known[slot] = known + 1
        if known + 1 - self._num_stored == RECENT:
            self.store()

    def store(self) -> None:
        """Take the recent tokens over; the buffer doubles when full."""
        first, known = self._num_stored, self.num_known
        if known > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(RECENT, len(self._ids)), np.int32)))
        self._ids[first:known] = self.rows.recent[self.slot, np.arange(first, known) % RECENT]
        self._num_stored = known
        self.rows.look_at[self.slot] = min(self.full_at, known + RECENT)

    # ---- slot and pages --------------------------------------------------------------------

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.base

    @property
    def is_waiting(self) -> bool:
        return self.slot < 0

    @property
    def pages(self) -> Ids:
        """The row of its pages (a view)."""
        row: Ids = self.rows.pages[self.slot]
        return row

    @property
    def window(self) -> Ids:
        """The row of its pages of the window layers, 0 where passed (a view)."""
        row: Ids = self.rows.window[self.slot]
        return row

    def enter(self, rows: Rows, slot: int) -> None:
        """Get a slot; nothing is computed and no page held."""
        self.rows, self.slot = rows, slot
        rows.requests[slot] = self
        rows.computed[slot] = rows.done[slot] = rows.inflight[slot] = rows.room[slot] = 0
        rows.known[slot], rows.sent[slot] = self._num_stored, self._num_sent
        rows.full_at[slot], rows.last[slot] = self.full_at, self.full_at - 1
        rows.look_at[slot] = min(self.full_at, self._num_stored + RECENT)
        rows.base[slot], rows.interval[slot] = self.base, self.interval
        asks_more = self.wire.logprobs is not None or self.wire.return_hidden_states
        rows.asks_more[slot], rows.rids[slot] = asks_more, self.rid
        rows.is_plain[slot] = not (self.is_followed or asks_more)

    def leave(self) -> None:
        """Give the slot back."""
        rows, slot = self.rows, self.slot
        self._num_sent = self.num_sent
        if self.num_known > self._num_stored:
            self.store()
        rows.requests[slot], rows.last[slot], rows.is_plain[slot] = None, 0, False
        self.rows, self.slot = _WAITING, -1
        self.handle, self.inserted = None, 0

    def add_pages(self, new: Ids, window: Ids | None, page_size: int) -> None:
        """Pages that follow those held; ``window``: of the window layers' space, as many."""
        first = self.room // page_size
        end = first + len(new)
        self.rows.widen(end)
        self.pages[first:end] = new
        if window is not None:
            self.window[first:end] = window
        self.room = end * page_size

    # ---- its way ---------------------------------------------------------------------------

    def end(self, finish: Finish) -> None:
        """Nothing more is planned, and what is in flight is not told."""
        self.finish = finish
        if self.slot >= 0:
            self.rows.last[self.slot], self.rows.is_plain[self.slot] = 0, False

    def compute_known(self) -> None:
        """All that is known is to be computed as a piece of prompt."""
        self.base = self.num_known
        if self.slot >= 0:
            self.rows.base[self.slot] = self.base

    def back_to_queue(self) -> None:
        """It has lost its slot: all known tokens will be computed again."""
        self.compute_known()
        self.num_cached = 0
        self.retractions += 1
