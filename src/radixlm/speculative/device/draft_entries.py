"""DraftEntries: the tokens whose entries a draft model's KV cache still lacks.

Each step's tokens wait here until drafts are asked for. So a request that does not draft costs next
to nothing. Where tokens were dropped, or a request with the same prefix has left no entries, the
draft model reads entries from a later place on only (``base``).

Legend: E entries, N channels of the target's hidden states, S sequences, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor.device_tables import DeviceTables
from radixlm.speculative.device.drafter import StepTail
from radixlm.step.batch import ForwardBatch
from radixlm.step.plan import Items

Int64Array = NDArray[np.int64]


class Entries(Record, eq=False):
    """Tokens at positions ``at_E`` of ``slots_E``, in their order, and the target's hidden states
    before them (None: not read)."""

    slots_E: Int64Array
    at_E: Int64Array
    tokens_E: Tensor
    hidden_EN: Tensor | None


class PageGroups(Record):
    """With data-parallel attention groups of slots number their pages apart: those of ``slots``
    slots have ``pages`` places each in a draft's pool. 0: all slots share one numbering."""

    slots: int = 0
    pages: int = 0

    def first_pages(self, num_slots: int) -> Int64Array:
        """Where the pages of each slot's group begin, int64 [slots]; the last slot is the dummy."""
        first = np.arange(num_slots) // max(1, self.slots) * self.pages
        first[-1] = 0
        return first


class DraftEntries:
    """By slot: positions [``base``, ``done``) have entries; ``base`` is the first of a page."""

    def __init__(
        self,
        tables: DeviceTables,
        page_size: int,
        is_head: bool,
        groups: PageGroups,
        lag: int = 0,
    ) -> None:
        """``is_head``: token 0 has no entry, since no hidden state comes before it. ``lag`` 1: an
        entry is of a hidden state alone and stands at the place of its token, one before that of
        the token that comes with it; so the last known token has none."""
        self._tables, self._page_size, self._is_head = tables, page_size, is_head
        self._groups, self._lag = groups, lag
        num_slots = tables.num_slots + 1
        self._first_page = groups.first_pages(num_slots)
        self.base: Int64Array = np.zeros(num_slots, np.int64)
        self.done: Int64Array = np.full(num_slots, -1)  # -1: nothing is known of the request
        self._end: Int64Array = np.zeros(num_slots, np.int64)  # behind the last token
        # positions below have entries too where the drafts at them were accepted
        self._drafted: Int64Array = np.zeros(num_slots, np.int64)
        self._since: Int64Array = np.zeros(num_slots, np.int64)  # its request's first step
        # numbers of steps, and as in Entries
        self._steps: list[tuple[Int64Array, Int64Array, Int64Array, Tensor, Tensor | None]] = []
        self._num_steps = self.num_tokens = 0
        self._last: dict[int, tuple[int, Tensor]] = {}  # a chunk's end and last hidden state
        self._blanks: list[tuple[int, int]] = []  # slots and positions that need zeros
        self.filled: set[int] = set()  # pages all of whose entries were written

    def release(self, slot: int) -> None:
        """The slot's request is over; others may have its pages from now on."""
        if self.done[slot] >= 0:
            self._empty(slot, int(self.done[slot]) - self._lag, int(self._end[slot]))
        self.base[slot] = self._end[slot] = self._drafted[slot] = 0
        self.done[slot], self._since[slot] = -1, self._num_steps
        self._last.pop(slot, None)
        self._blanks = [blank for blank in self._blanks if blank[0] != slot]

    def lack(self, group: int, pages: NDArray[np.int32]) -> None:
        """These pages of an attention group have come without entries."""
        self.filled.difference_update((pages + group * self._groups.pages).tolist())

    def _empty(self, slot: int, begin: int, end: int) -> None:
        """The pages of these positions lack entries."""
        pages = self._pages_of(slot, begin // self._page_size, end // self._page_size + 1)
        self.filled.difference_update(pages)

    # ---- what steps made known -----------------------------------------------------------------

    def drafted(self, slots_R: Int64Array, ends_R: Int64Array) -> None:
        """Entries of drafts up to these positions were written: they hold if they are accepted."""
        self._drafted[slots_R] = ends_R

    def add(
        self, slots_E: Int64Array, at_E: Int64Array, tokens_E: Tensor, hidden_EN: Tensor | None
    ) -> None:
        """Tokens that wait from now on."""
        self._end[slots_E] = at_E
        number_E = np.full(len(at_E), self._num_steps)
        self._steps.append((number_E, slots_E, at_E, tokens_E, hidden_EN))
        self.num_tokens += len(at_E)

    def skip(self, items: Items) -> None:
        """A step whose tokens get no entries."""
        self._end[items.decodes.slots] = items.starts + 1
        for item in items.prefills:
            if item.pooling is None:
                self._begin_chunk(item.slot, item.start, item.count)
                self._end[item.slot] = item.start + item.count
        self._drafted[:] = 0

    def add_step(self, batch: ForwardBatch, tail: StepTail, hidden_TN: Tensor | None) -> None:
        """The tokens that a step made known: those behind its first one in each sequence, and where
        it sampled one, that."""
        self._num_steps += 1
        items: Items = tail.items
        if not items.prefills and items.drafts is None and not self._drafted.any():
            self.add(items.decodes.slots, items.starts + 1, tail.next_tokens_R, hidden_TN)
            return
        chunks = [item for item in items.prefills if item.pooling is None]
        num, is_chunk = len(items.starts), [item.pooling is None for item in items.prefills]
        firsts_S = batch.query_start_S1.cpu().numpy()
        of_decodes = firsts_S[tail.sequences_R[:num].cpu().numpy()]  # of the paths that were right
        of_chunks = firsts_S[num : len(items) - len(items.paths)][is_chunk]
        firsts_S = np.append(of_decodes, of_chunks).astype(np.int64)
        slots_S = np.append(items.decodes.slots, [one.slot for one in chunks]).astype(np.int64)
        starts_S = np.append(items.starts, [one.start for one in chunks]).astype(np.int64)
        accepted_S = tail.num_accepted_R[:num].cpu().numpy()
        counts_S = np.append(accepted_S + 1, [one.count for one in chunks]).astype(np.int64)
        emits_S = np.array([True] * num + [one.emit for one in chunks])
        self._settle(slots_S[:num], (starts_S + counts_S)[:num])
        known_S = counts_S - ~emits_S
        at_E, index_E = ranges(starts_S + 1, known_S)
        row_E, _ = ranges(firsts_S, known_S)
        ids_T = batch.token_ids_T
        tokens_E = ids_T[torch.from_numpy(np.minimum(row_E + 1, len(ids_T) - 1)).to(ids_T.device)]
        ends = np.cumsum(known_S)[emits_S] - 1
        tokens_E[torch.from_numpy(ends).to(ids_T.device)] = tail.next_tokens_R.to(tokens_E.dtype)
        rows_E = torch.from_numpy(row_E).to(ids_T.device)
        hidden_EN = None if hidden_TN is None else hidden_TN[rows_E]
        for first, item in zip(firsts_S[num:].tolist(), chunks, strict=True):
            self._add_first(item.slot, item.start, item.count, ids_T[first : first + 1], hidden_TN)
            if not item.emit and hidden_TN is not None:
                end = first + item.count
                self._last[item.slot] = item.start + item.count, hidden_TN[end - 1 : end].clone()
        self.add(slots_S[index_E], at_E, tokens_E, hidden_EN)

    def _settle(self, slots_R: Int64Array, ends_R: Int64Array) -> None:
        """The drafts before ``ends_R`` were accepted."""
        right_R = np.minimum(self._drafted[slots_R], ends_R)
        self.done[slots_R] = np.maximum(self.done[slots_R], right_R)
        self._drafted[:] = 0

    def _add_first(
        self, slot: int, start: int, count: int, token_1: Tensor, hidden_TN: Tensor | None
    ) -> None:
        """The first token of a chunk, whose hidden state is from the chunk before."""
        self._begin_chunk(slot, start, count)
        if start == 0 and self._is_head:
            return
        hidden_1N = None
        if hidden_TN is not None:
            end, hidden_1N = self._last.pop(slot, (-1, hidden_TN[:1]))
            if end != start:  # a prefix hit: not known
                hidden_1N = torch.zeros_like(hidden_TN[:1])
        self.add(np.array([slot]), np.array([start]), token_1.clone(), hidden_1N)

    def _begin_chunk(self, slot: int, start: int, count: int) -> None:
        """The pages of a chunk have no entries yet."""
        if self.done[slot] < 0:
            self._begin(slot, start)
        self._empty(slot, -(-start // self._page_size) * self._page_size, start + count)

    def _begin(self, slot: int, start: int) -> None:
        """A request whose first ``start`` tokens another one has computed."""
        pages = self._pages_of(slot, 0, start // self._page_size)
        lacking = [i for i, page in enumerate(pages) if page not in self.filled]
        self.base[slot] = (lacking[-1] + 1) * self._page_size if lacking else 0
        self.done[slot] = start + self._lag
        if start == 0 and self._is_head and not self._lag:
            self._blanks.append((slot, 0))
            self.done[slot] = 1

    # ---- what is written -----------------------------------------------------------------------

    def take(self, slots_R: Int64Array | None = None) -> Entries | None:
        """All tokens of these slots that wait (None: of all), by slot and position; None of none.
        They count as written."""
        if not self._steps:
            return None
        number_E, slots_E, at_E = (
            np.concatenate(part) for part in zip(*(one[:3] for one in self._steps), strict=True)
        )
        tokens_E = torch.cat([one[3] for one in self._steps])
        hidden: list[Any] = [one[4] for one in self._steps]
        hidden_EN = None if hidden[0] is None else torch.cat(hidden)
        self._steps.clear()
        waits_E = (number_E > self._since[slots_E]) & (at_E >= self.done[slots_E])
        if slots_R is not None:
            is_wanted_E = np.isin(slots_E, slots_R)
            left_E = np.flatnonzero(waits_E & ~is_wanted_E)
            waits_E &= is_wanted_E
            if len(left_E):
                pick_E = self._on_device(left_E)
                left_EN = None if hidden_EN is None else hidden_EN[pick_E]
                left = number_E[left_E], slots_E[left_E], at_E[left_E], tokens_E[pick_E], left_EN
                self._steps.append(left)
        self.num_tokens = sum(len(one[0]) for one in self._steps)
        index_E = np.flatnonzero(waits_E)
        if not len(index_E):
            return None
        keys_E = (slots_E[index_E] << 32) | at_E[index_E]
        index_E = index_E[np.unique(keys_E, return_index=True)[1]]
        slots_E, at_E, pick_E = slots_E[index_E], at_E[index_E], self._on_device(index_E)
        self._advance(slots_E, at_E)
        hidden_EN = None if hidden_EN is None else hidden_EN[pick_E]
        return Entries(slots_E, at_E, tokens_E[pick_E], hidden_EN)

    def _on_device(self, numbers: Int64Array) -> Tensor:
        return torch.from_numpy(numbers).to(self._tables.device)

    def _advance(self, slots_E: Int64Array, at_E: Int64Array) -> None:
        """These are written next."""
        first_S = np.flatnonzero(np.diff(slots_E, prepend=-1))
        ends_S = np.append(first_S[1:], len(slots_E)) - 1
        size, lag = self._page_size, self._lag
        rows_S3 = np.stack((slots_E[first_S], at_E[first_S], at_E[ends_S]), 1) - (0, lag, lag)
        for slot, first, last in rows_S3.tolist():
            if self.done[slot] < 0:
                self._begin(slot, first)
            done = int(self.done[slot]) - lag
            if first > done:  # tokens between were dropped
                self.base[slot] = base = first // size * size
                self._empty(slot, done, base)
                self._blanks += [(slot, position) for position in range(max(base, done), first)]
                done = first
            elif (last + 1) // size > done // size:
                begin = max(done, int(self.base[slot])) // size
                self.filled.update(self._pages_of(slot, begin, (last + 1) // size))
            self.done[slot] = last + 1 + lag

    def blanks(self) -> Tensor | None:
        """Places of the cache that need zeros: int64; None of none."""
        if not self._blanks:
            return None
        slots, at = np.array(self._blanks).T
        self._blanks = []
        return self._on_device(self.places(slots, at))

    def _pages_of(self, slot: int, begin: int, end: int) -> list[int]:
        """The pages at the columns from ``begin`` to ``end`` of a slot."""
        pages = self._tables.pages[0, slot, begin:end] + self._first_page[slot]
        return pages.tolist()  # type: ignore[no-any-return]

    def pages(self, slots: Int64Array, columns: Int64Array) -> Int64Array:
        """Numbers in the draft's pool of the pages at these columns of the slots' page tables."""
        pages: Int64Array = self._tables.pages[0, slots, columns] + self._first_page[slots]
        return pages

    def places(self, slots_E: Int64Array, at_E: Int64Array) -> Int64Array:
        """Where the cache keeps entries: page * page_size + offset."""
        pages_E = self.pages(slots_E, at_E // self._page_size)
        return pages_E * self._page_size + at_E % self._page_size


def ranges(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The numbers starts[i] .. starts[i] + counts[i] - 1, one range after another, and their i."""
    index = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return starts[index] + np.arange(len(index)) - before[index], index
