"""Request: what scheduling needs to know of one sequence, and nothing of any feature.

             prompt_len        num_tokens
ids  |---- prompt ----|-- output --|
     |--- cached ---|--- computed ---|        computed counts steps in flight,
                                              done only the committed ones

What changes with each token stands in the columns of ``SlotTable`` while the request has a slot.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from radixlm.memory.prefix.base import Handle
from radixlm.scheduler.slot_table import RECENT, SlotTable
from radixlm.step.plan import Int32Array
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest

_WAITING = SlotTable(0).freeze()


class SlotField:
    """An attribute of a request that is a place in a column of its table."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, request: None, owner: Any = None) -> SlotField: ...
    @overload
    def __get__(self, request: Request, owner: Any = None) -> int: ...
    def __get__(self, request: Request | None, owner: Any = None) -> int | SlotField:
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
        "cache_key",
        "emit_interval",
        "finish",
        "handle",
        "has_token_hook",
        "is_window_locked",
        "max_len",
        "max_new_tokens",
        "min_new_tokens",
        "num_cached",
        "num_inserted",
        "prefill_len",
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

    num_computed = SlotField()
    num_committed = SlotField()
    inflight = SlotField()
    num_allocated = SlotField()  # tokens that its pages hold

    def __init__(
        self,
        wire: TokenizedRequest,
        stop_ids: frozenset[int],
        key: str | None,
        share_limit: int = 1 << 62,
    ) -> None:
        self._ids = np.array(wire.ids(), dtype=np.int32)
        self.wire, self.rid, self.stop_ids, self.cache_key = wire, wire.rid, stop_ids, key
        self.max_new_tokens = wire.sampling.max_new_tokens or 0
        self.min_new_tokens = wire.sampling.min_new_tokens
        self._num_stored = self._num_sent = len(self._ids)
        self.prompt_len = len(self._ids) - wire.num_emitted
        self.prefill_len = len(self._ids)  # tokens to compute before the next new one
        self.num_cached = 0
        self.share_limit = share_limit  # tokens from here on are never put into the tree
        self.num_inserted = 0  # tokens that the prefix tree holds for this request
        self.rows, self.slot = _WAITING, -1
        self.is_window_locked = True
        self.handle: Handle | None = None
        self.finish: Finish | None = None
        self.retractions = 0
        self.queued_s = wire.arrival_s
        self.started_s = 0.0
        # set on arrival: known tokens at which it ends, tokens between two deltas, and whether a
        # feature wants to know its tokens
        self.max_len, self.emit_interval, self.has_token_hook = 0, 1, False

    # ---- tokens ----------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return self._num_stored if self.slot < 0 else self.rows.num_tokens.item(self.slot)

    @property
    def ids(self) -> Int32Array:
        """All known tokens (a view)."""
        num_tokens = self.num_tokens
        if num_tokens > self._num_stored:
            self.store()
        return self._ids[:num_tokens]

    @property
    def output_ids(self) -> Int32Array:
        return self.ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def num_unsent(self) -> int:
        """Tokens that intake does not know."""
        return self.num_tokens - self.num_sent

    @property
    def num_sent(self) -> int:
        return self._num_sent if self.slot < 0 else self.rows.num_sent.item(self.slot)

    def take_unsent(self) -> list[int]:
        """Tokens that intake does not know; it will."""
        fresh: list[int] = self.ids[self.num_sent :].tolist()
        self._num_sent = self.num_tokens
        if self.slot >= 0:
            self.rows.num_sent[self.slot] = self._num_sent
        return fresh

    def append(self, token: int) -> None:
        """One more token of a running request is known."""
        rows, slot, known = self.rows, self.slot, self.num_tokens
        rows.recent[slot, known % RECENT] = token
        rows.num_tokens[slot] = known + 1
        if known + 1 - self._num_stored == RECENT:
            self.store()

    def store(self) -> None:
        """Take the recent tokens over; the buffer doubles when full."""
        first, known = self._num_stored, self.num_tokens
        if known > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(RECENT, len(self._ids)), np.int32)))
        self._ids[first:known] = self.rows.recent[self.slot, np.arange(first, known) % RECENT]
        self._num_stored = known
        self.rows.check_at[self.slot] = min(self.max_len, known + RECENT)

    # ---- slot and pages --------------------------------------------------------------------

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    @property
    def is_waiting(self) -> bool:
        return self.slot < 0

    @property
    def pages(self) -> Int32Array:
        """The row of its pages (a view)."""
        row: Int32Array = self.rows.pages[self.slot]
        return row

    @property
    def window(self) -> Int32Array:
        """The row of its pages of the window layers, 0 where passed (a view)."""
        row: Int32Array = self.rows.window[self.slot]
        return row

    def enter(self, rows: SlotTable, slot: int) -> None:
        """Get a slot; nothing is computed and no page held."""
        self.rows, self.slot = rows, slot
        rows.requests[slot] = self
        rows.num_computed[slot] = rows.num_committed[slot] = rows.inflight[
            slot
        ] = rows.num_allocated[slot] = 0
        rows.num_tokens[slot], rows.num_sent[slot] = self._num_stored, self._num_sent
        rows.max_len[slot], rows.end[slot] = self.max_len, self.max_len - 1
        rows.check_at[slot] = min(self.max_len, self._num_stored + RECENT)
        rows.prefill_len[slot], rows.emit_interval[slot] = self.prefill_len, self.emit_interval
        needs_extras = self.wire.logprobs is not None or self.wire.return_hidden_states
        rows.needs_extras[slot], rows.rids[slot] = needs_extras, self.rid
        rows.is_fast_path[slot] = not (self.has_token_hook or needs_extras)

    def leave(self) -> None:
        """Give the slot back."""
        rows, slot = self.rows, self.slot
        self._num_sent = self.num_sent
        if self.num_tokens > self._num_stored:
            self.store()
        rows.requests[slot], rows.end[slot], rows.is_fast_path[slot] = None, 0, False
        self.rows, self.slot = _WAITING, -1
        self.handle, self.num_inserted = None, 0

    def add_pages(self, new: Int32Array, window: Int32Array | None, page_size: int) -> None:
        """Pages that follow those held; ``window``: of the window layers' space, as many."""
        first = self.num_allocated // page_size
        end = first + len(new)
        self.rows.widen(end)
        self.pages[first:end] = new
        if window is not None:
            self.window[first:end] = window
        self.num_allocated = end * page_size

    # ---- its way ---------------------------------------------------------------------------

    def end(self, finish: Finish) -> None:
        """Nothing more is planned, and what is in flight is not told."""
        self.finish = finish
        if self.slot >= 0:
            self.rows.end[self.slot], self.rows.is_fast_path[self.slot] = 0, False

    def prefill_all(self) -> None:
        """All that is known is to be computed as a piece of prompt."""
        self.prefill_len = self.num_tokens
        if self.slot >= 0:
            self.rows.prefill_len[self.slot] = self.prefill_len

    def reset_for_retract(self) -> None:
        """It has lost its slot: all known tokens will be computed again."""
        self.prefill_all()
        self.num_cached = 0
        self.retractions += 1
