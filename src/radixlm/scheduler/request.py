"""Request: what scheduling needs to know of one sequence, and nothing about any feature.

             prompt_len        num_tokens
ids  |---- prompt ----|-- output --|
     |--- cached ---|--- computed ---|    num_computed includes steps in flight,
                                          num_committed does not

Of a request with a streaming window, ``ids`` are the tokens in the window: those behind its sinks
that it has passed are dropped (``slide``), and everything is counted without them.

While the request has a slot, the numbers that change with every token are in ``SlotTable``.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from radixlm.memory.prefix.base import Handle
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.slot_table import RECENT, SlotTable
from radixlm.step.plan import Int32Array
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest

UNLIMITED = 1 << 62
_NO_SLOT = SlotTable(0).freeze()


class SlotField:
    """An attribute of a request that is stored in the column of that name of its slot table."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, request: None, owner: Any = None) -> SlotField: ...
    @overload
    def __get__(self, request: Request, owner: Any = None) -> int: ...
    def __get__(self, request: Request | None, owner: Any = None) -> int | SlotField:
        if request is None:
            return self
        value: int = getattr(request.table, self._name).item(request.slot)
        return value

    def __set__(self, request: Request, value: int) -> None:
        getattr(request.table, self._name)[request.slot] = value


class Request:
    """One sequence from arrival to release. Only the scheduler changes it."""

    __slots__ = (
        "_ids",
        "_num_sent",
        "_num_stored",
        "arrived",
        "dropped_output",
        "emit_interval",
        "finish",
        "goes_on",
        "group",
        "handle",
        "has_token_hook",
        "is_window_locked",
        "max_len",
        "max_new_tokens",
        "min_new_tokens",
        "namespace",
        "num_cached",
        "num_dropped",
        "num_inserted",
        "prefill_len",
        "prompt_len",
        "queued_s",
        "retractions",
        "rid",
        "share_limit",
        "slot",
        "started_s",
        "stop_ids",
        "table",
        "wire",
    )

    num_computed = SlotField()
    num_committed = SlotField()
    inflight = SlotField()
    num_allocated = SlotField()

    def __init__(
        self,
        wire: TokenizedRequest,
        stop_ids: frozenset[int],
        namespace: CacheNamespace,
        share_limit: int = UNLIMITED,
    ) -> None:
        self._ids = np.array(wire.ids(), dtype=np.int32)
        self.wire, self.rid, self.stop_ids, self.namespace = wire, wire.rid, stop_ids, namespace
        self.max_new_tokens = wire.sampling.max_new_tokens or 0
        self.min_new_tokens = wire.sampling.min_new_tokens
        self._num_stored = self._num_sent = len(self._ids)
        self.prompt_len = len(self._ids) - wire.num_emitted
        self.prefill_len = len(self._ids)
        self.num_cached = 0  # leading tokens whose KV the prefix cache had at admission
        self.share_limit = share_limit  # tokens from here on neither come from nor go to the cache
        self.arrived: dict[str, int] | None = None  # tokens of the prefix that a tier brought
        self.num_dropped = 0  # tokens that have left the streaming window
        self.dropped_output = self._ids[:0]  # those of them that were output
        self.num_inserted = 0  # leading tokens whose pages the prefix cache owns
        self.table, self.slot = _NO_SLOT, -1
        self.group = -1  # of data-parallel attention: where pages were brought to for it
        self.is_window_locked = True
        self.handle: Handle | None = None  # the cached prefix that it has locked
        self.finish: Finish | None = None
        self.retractions = 0
        self.queued_s = wire.arrival_s
        self.started_s = 0.0
        # set on arrival; has_token_hook: a feature wants to be called with its tokens; goes_on: and
        # needs none of them before the next
        self.max_len, self.emit_interval = 0, 1
        self.has_token_hook, self.goes_on = False, True

    # ---- tokens ----------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return self._num_stored if self.slot < 0 else self.table.num_tokens.item(self.slot)

    @property
    def ids(self) -> Int32Array:
        """Prompt and output so far (a view)."""
        num_tokens = self.num_tokens
        if num_tokens > self._num_stored:
            self.store_recent()
        return self._ids[:num_tokens]

    @property
    def output_ids(self) -> Int32Array:
        return self.ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def whole_output(self) -> Int32Array:
        """The output so far, with what has left the streaming window."""
        window, output = self.wire.streaming, self.output_ids
        in_sinks = max(0, window.sinks - self.prompt_len) if window is not None else 0
        return np.concatenate((output[:in_sinks], self.dropped_output, output[in_sinks:]))

    @property
    def num_unsent(self) -> int:
        """Tokens that have not been sent to intake."""
        return self.num_tokens - self.num_sent

    @property
    def num_sent(self) -> int:
        return self._num_sent if self.slot < 0 else self.table.num_sent.item(self.slot)

    def take_unsent(self) -> list[int]:
        """The tokens that have not been sent to intake; they count as sent from now on."""
        unsent: list[int] = self.ids[self.num_sent :].tolist()
        self._num_sent = self.num_tokens
        if self.slot >= 0:
            self.table.num_sent[self.slot] = self._num_sent
        return unsent

    def append(self, token: int) -> None:
        """Append one output token; the request must have a slot."""
        table, slot, num_tokens = self.table, self.slot, self.num_tokens
        table.recent[slot, num_tokens % RECENT] = token
        table.num_tokens[slot] = num_tokens + 1
        if num_tokens + 1 - self._num_stored == RECENT:
            self.store_recent()

    def store_recent(self) -> None:
        """Copy the recent tokens out of the ring; the buffer doubles when it is full."""
        first, end = self._num_stored, self.num_tokens
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(RECENT, len(self._ids)), np.int32)))
        self._ids[first:end] = self.table.recent[self.slot, np.arange(first, end) % RECENT]
        self._num_stored = end
        self.table.check_at[self.slot] = min(self.max_len, end + RECENT)

    # ---- slot and pages --------------------------------------------------------------------

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    @property
    def is_waiting(self) -> bool:
        return self.slot < 0

    @property
    def pages(self) -> Int32Array:
        """Its row of the page table (a view)."""
        row: Int32Array = self.table.pages[self.slot]
        return row

    @property
    def window(self) -> Int32Array:
        """Its row of the window layers' page table, 0 where the window has passed (a view)."""
        row: Int32Array = self.table.window[self.slot]
        return row

    def assign_slot(self, table: SlotTable, slot: int) -> None:
        """Take a slot, with nothing computed and no pages."""
        self.table, self.slot = table, slot
        table.num_computed[slot] = table.num_committed[slot] = 0
        table.inflight[slot] = table.num_allocated[slot] = 0
        table.num_tokens[slot], table.num_sent[slot] = self._num_stored, self._num_sent
        # the last token is never computed, as nothing is sampled after it
        table.max_len[slot], table.end[slot] = self.max_len, self.max_len - 1
        table.check_at[slot] = min(self.max_len, self._num_stored + RECENT)
        table.prompt_len[slot], table.prefill_len[slot] = self.prompt_len, self.prefill_len
        table.emit_interval[slot] = self.emit_interval
        needs_extras = self.wire.logprobs is not None or self.wire.wants_rows
        table.needs_extras[slot], table.rids[slot] = needs_extras, self.rid
        table.is_fast_path[slot] = not (self.has_token_hook or needs_extras)
        table.goes_on[slot] = self.goes_on and not needs_extras

    def release_slot(self) -> None:
        """Give the slot back and keep the tokens."""
        table, slot = self.table, self.slot
        self._num_sent = self.num_sent
        if self.num_tokens > self._num_stored:
            self.store_recent()
        table.end[slot], table.is_fast_path[slot] = 0, False
        self.table, self.slot = _NO_SLOT, -1
        self.handle, self.num_inserted = None, 0

    def add_pages(self, new: Int32Array, window: Int32Array | None, page_size: int) -> None:
        """Append pages; ``window``: as many pages of the window layers' space."""
        first = self.num_allocated // page_size
        end = first + len(new)
        self.table.reserve_pages(end)
        self.pages[first:end] = new
        if window is not None:
            self.window[first:end] = window
        self.num_allocated = end * page_size

    # ---- streaming window ------------------------------------------------------------------

    @property
    def is_window_full(self) -> bool:
        """Whether it goes on, but must slide before."""
        goes_on = self.prompt_len + self.max_new_tokens > self.max_len
        return self.wire.streaming is not None and goes_on and self.num_tokens >= self.max_len

    def slide(self) -> int:
        """Drop the tokens that have left its streaming window; how many they are. What is left is
        prefill. The request has no slot, and its dropped tokens were sent."""
        window = self.wire.streaming
        if window is None:
            return 0
        first = window.sinks
        count = window.num_dropped(self.num_tokens + self.num_dropped) - self.num_dropped
        of_prompt = min(count, max(0, self.prompt_len - first))
        dropped_output = self.ids[first + of_prompt : first + count]
        self.dropped_output = np.concatenate((self.dropped_output, dropped_output))
        self._ids = np.delete(self.ids, slice(first, first + count))
        self._num_stored, self._num_sent = len(self._ids), self._num_sent - count
        self.prompt_len -= of_prompt
        self.num_dropped += count
        self.max_new_tokens -= len(dropped_output)
        self.min_new_tokens = max(0, self.min_new_tokens - len(dropped_output))
        self.max_len = min(self.prompt_len + self.max_new_tokens, window.size)
        self.prefill_all()
        return count

    def place(self, position: int) -> int:
        """Where the token of the stream at ``position`` is, or would be, among ``ids``."""
        window = self.wire.streaming
        if window is None or position < window.sinks:
            return position
        return max(window.sinks, position - self.num_dropped)

    # ---- changes of state ------------------------------------------------------------------

    def end(self, finish: Finish) -> None:
        """Plan nothing more for it, and ignore the tokens of steps in flight."""
        self.finish = finish
        if self.slot >= 0:
            self.table.end[self.slot], self.table.is_fast_path[self.slot] = 0, False

    def prefill_all(self) -> None:
        """Compute all tokens known by now as prefill."""
        self.prefill_len = self.num_tokens
        if self.slot >= 0:
            self.table.prefill_len[self.slot] = self.prefill_len

    def reset_for_retract(self) -> None:
        """After it lost its slot: all of its tokens will be computed again."""
        self.prefill_all()
        self.num_cached = 0
        self.retractions += 1
