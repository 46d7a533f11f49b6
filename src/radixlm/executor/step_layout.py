"""The layout of a step's inputs in one int32 buffer, so that one copy brings them to the device.

The buffer is a table [FIELDS, rows], with a column for each sequence (or row of logits), then a
tail: the token ids of chunks, and the changed entries of the page tables (index and value).
Sampling parameters are in the table too (``sampling/plain.py``).

A sequence that verifies drafted tokens has a row of logits for each of its tokens, others one or
none.

Legend: S sequences, N sequences with results, P further paths of drafts, A = N + P sequences with
logits, T tokens, R rows of logits, U changed entries of the page tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record
from radixlm.executor.device_tables import DeviceTables
from radixlm.sampling.plain import NUM_PARAMS, SamplingKinds, SamplingParamTable
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Drafts, Items
from radixlm.wire.media import plain_ids

Ints = NDArray[np.int32]

# of a sequence; SLOT: its row of the page tables; ROPE_LEN: the least length that its ropes use (of
# decodes: exactly that); IS_LATE: START and KV_LEN count drafts that the device may have refused;
# FIRST_TOKEN has S + 1 entries
SLOT, START, ROPE_LEN, COUNT, KV_LEN, IS_LATE, FIRST_TOKEN = range(7)
# of a row of logits: its token, the token of the next row of its sequence (-1 for none; only where
# tokens are verified), its slot, the position of the sampled token, its sampling parameters
TOKEN, NEXT_TOKEN, SAMPLE_SLOT, POSITION, PARAMS = range(7, 12)
FIELDS = PARAMS + NUM_PARAMS
_NO_SLOTS = np.zeros(0, np.int64)
FROM_TABLE = -1  # instead of a token id: the one in the token table; -1 - j: its j-th draft


@dataclass(slots=True)
class StepShape:
    """What the host knows of a packed step. ``slots_R``: slots of the rows with logits.
    ``first_A1``: with drafts, the first row of each sequence that has rows, and R. ``owners_P``:
    the sequences of which the last ones are further paths of drafts; None: there are none."""

    num_sequences: int
    num_tokens: int
    num_updates: int
    max_query_len: int
    max_kv_len: int
    slots_R: NDArray[np.int64]
    kinds: SamplingKinds
    is_decode: bool  # every sequence takes its one token from the token table, and emits
    first_A1: NDArray[np.int64] | None = None
    owners_P: NDArray[np.int64] | None = None
    num_decodes: int = 0  # of the sequences of a step with drafts
    num_padded: int = 0  # tokens of its graph, of one with drafts or prompts
    has_late: bool = False
    # what did not fit into the buffer: token ids; indices and values of the page tables
    extra_tokens: Ints | None = None
    extra_updates: tuple[Ints, Ints] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots_R)

    @property
    def num_results(self) -> int:
        if self.first_A1 is None:
            return self.num_rows
        return len(self.first_A1) - 1 - (0 if self.owners_P is None else len(self.owners_P))

    @property
    def num_tail_tokens(self) -> int:
        """Token ids in the buffer."""
        if self.is_decode or self.extra_tokens is not None:
            return 0
        return max(self.num_tokens, self.num_padded)


class _DecodeTemplate(Record):
    """The table of a step that decodes a batch, but for what changes from step to step."""

    decodes: DecodeBatch
    head: Ints  # [FIELDS, rows + 1]
    slots_R: NDArray[np.int64]
    prompt_len: Ints  # [rows]
    kinds: SamplingKinds


class StepPacker:
    """Writes the inputs of steps into buffers of one fixed size."""

    def __init__(
        self,
        tables: DeviceTables,
        params: SamplingParamTable,
        max_rows: int,
        max_tokens: int,
        max_updates: int,
    ) -> None:
        self.tables, self.params = tables, params
        self.max_rows = max_rows + 1  # FIRST_TOKEN has one entry more
        self.max_tokens, self.max_updates = max_tokens, max_updates
        self.num_head = FIELDS * self.max_rows
        self.num_ints = self.num_head + max_tokens + 2 * max_updates
        self._template: _DecodeTemplate | None = None

    def pack(
        self,
        items: Items,
        host: Tensor,
        num_padded: int = 0,
        width: int = 1,
        num_tokens: int = 0,
    ) -> tuple[StepShape, int]:
        """Fill ``host``; the step's shape, and how many of the integers are used. If all items are
        decodes, rows of the dummy slot fill it up to ``num_padded``; with drafts then, each row has
        ``width`` tokens, of which the last may be void. With ``num_tokens`` the step may have
        prompts, and is filled up to so many tokens of ``num_padded`` sequences."""
        ints: Ints = host.numpy()
        head = ints[: self.num_head].reshape(FIELDS, -1)
        if num_padded and items.drafts is not None and not num_tokens:
            shape = self._pack_even(items, head, ints, num_padded, width)
        elif not items.prefills and items.drafts is None and not num_tokens:
            shape = self._pack_decodes(items, head, num_padded)
        else:
            shape = self._pack_mixed(items, head, ints)
            if num_tokens:
                self._pad_mixed(shape, ints, num_padded, num_tokens)
        return shape, self._pack_updates(shape, ints, self.num_head + shape.num_tail_tokens)

    def fill_dummies(self, host: Tensor, count: int) -> None:
        """Write a step of ``count`` rows of the dummy slot."""
        head = host.numpy()[: self.num_head].reshape(FIELDS, -1)
        head[:, : count + 1] = self._make_template(EMPTY_DECODES, count).head

    def fill_dummy_prompt(self, host: Tensor, num_sequences: int, num_tokens: int) -> int:
        """Write a step of ``num_tokens`` tokens of the dummy slot; how many integers are used."""
        nothing = StepShape(0, 0, 0, 0, 0, _NO_SLOTS, SamplingKinds(True, True, False), False)
        ints: Ints = host.numpy()
        ints[: self.num_head] = 0
        self._pad_mixed(nothing, ints, num_sequences, num_tokens)
        return self.num_head + num_tokens

    def _pad_mixed(self, shape: StepShape, ints: Ints, size: int, num_tokens: int) -> None:
        """Fill a step up to ``num_tokens`` tokens of ``size`` sequences, and as many rows of
        logits. One sequence of the dummy slot gets the missing tokens: it reads nothing and writes
        to page 0. The sequences behind it are empty."""
        head = ints[: self.num_head].reshape(FIELDS, -1)
        count, used = shape.num_sequences, shape.num_tokens
        head[SLOT, count:size] = self.tables.dummy
        for field in (START, COUNT, KV_LEN, IS_LATE):
            head[field, count:size] = 0
        head[ROPE_LEN, count:size] = 1
        head[COUNT, count : min(count + 1, size)] = num_tokens - used
        head[FIRST_TOKEN, count + 1 : size + 1] = num_tokens
        head[TOKEN, shape.num_rows : size] = 0
        ints[self.num_head + used : self.num_head + num_tokens] = 0
        shape.num_padded = num_tokens

    def _pack_decodes(self, items: Items, head: Ints, num_padded: int) -> StepShape:
        decodes, after = items.decodes, items.starts + 1
        count = len(after)
        rows = max(count, num_padded)
        template = self._template
        if (
            template is None
            or template.decodes is not decodes
            or template.head.shape[1] != rows + 1
        ):
            template = self._template = self._make_template(decodes, rows)
        head[:, : rows + 1] = template.head
        head[START, :count] = items.starts
        head[KV_LEN, :count] = head[POSITION, :count] = after
        np.maximum(after, template.prompt_len[:count], out=head[ROPE_LEN, :count], casting="unsafe")
        max_kv_len = int(after.max())
        return StepShape(
            count, count, 0, 1, max_kv_len, template.slots_R, template.kinds, is_decode=True
        )

    def _make_template(self, decodes: DecodeBatch, rows: int) -> _DecodeTemplate:
        """Rows of one token each; those behind the batch are the dummy slot's and read nothing."""
        slots = np.full(rows, self.tables.dummy, np.int64)
        slots[: len(decodes.slots)] = decodes.slots
        prompt_len = self.tables.prompt_len[slots]
        head = np.zeros((FIELDS, rows + 1), np.int32)
        head[SLOT, :rows] = head[SAMPLE_SLOT, :rows] = slots
        head[COUNT] = head[POSITION] = 1
        head[ROPE_LEN, :rows] = np.maximum(prompt_len, 1)
        head[FIRST_TOKEN] = head[TOKEN] = np.arange(rows + 1)
        head[PARAMS:, :rows] = self.params.params_PS[:, slots]
        kinds = self.params.kinds(decodes.slots)
        return _DecodeTemplate(decodes, head, slots[: len(decodes.slots)], prompt_len, kinds)

    def _pack_mixed(self, items: Items, head: Ints, ints: Ints) -> StepShape:
        count, others = len(items), items.others
        num_decodes = count - len(others)
        slots = np.append(items.decodes.slots, [item.slot for item in others]).astype(np.int64)
        start = np.append(items.starts, [item.start for item in others]).astype(np.int32)
        drafts, counts = items.drafts, np.ones(count, np.int32)
        if drafts is not None:
            counts[:num_decodes] += drafts.lens
        num_rows = counts.copy()  # of logits
        counts[num_decodes:] = [item.count for item in others]
        num_rows[num_decodes:] = [item.emit if item.page_row < 0 else item.count for item in others]
        first = head[FIRST_TOKEN]
        first[0] = 0
        np.cumsum(counts, out=first[1 : count + 1])
        head[SLOT, :count], head[START, :count], head[COUNT, :count] = slots, start, counts
        if items.paths:
            head[SLOT, count - len(items.paths) : count] = [path.page_row for path in items.paths]
        head[KV_LEN, :count] = start + counts
        head[ROPE_LEN, :count] = self.tables.prompt_len[slots]
        sequence_R = np.repeat(np.arange(count), num_rows)
        sampled_slots, rows = slots[sequence_R], len(sequence_R)
        first_A1 = np.append(0, np.cumsum(num_rows[num_rows > 0]))
        # the rows of a sequence are its last tokens
        from_end_R = np.cumsum(num_rows)[sequence_R] - np.arange(rows)
        head[TOKEN, :rows] = token_R = first[1:][sequence_R] - from_end_R
        head[NEXT_TOKEN, :rows] = np.where(from_end_R > 1, token_R + 1, -1)
        head[SAMPLE_SLOT, :rows] = sampled_slots
        head[POSITION, :rows] = (start + counts)[sequence_R] - from_end_R + 1
        head[PARAMS:, :rows] = self.params.params_PS[:, sampled_slots]
        num_tokens = int(first[count])
        has_room = num_tokens <= self.max_tokens
        values = ints[self.num_head :][:num_tokens] if has_room else np.empty(num_tokens, np.int32)
        values[:] = FROM_TABLE
        if drafts is not None:
            offsets = np.arange(first[num_decodes]) - np.repeat(
                first[:num_decodes], counts[:num_decodes]
            )
            self._put_drafts(values[: len(offsets)], offsets, drafts)
        for item, begin in zip(others, first[num_decodes:count].tolist(), strict=True):
            if item.tokens is not None:
                values[begin : begin + item.count] = plain_ids(item.tokens)
        max_kv_len = int((start + counts).max())
        kinds = self.params.kinds(sampled_slots)
        max_query_len = int(counts.max())
        shape = StepShape(
            count, num_tokens, 0, max_query_len, max_kv_len, sampled_slots, kinds, is_decode=False
        )
        shape.extra_tokens = None if has_room else values
        head[IS_LATE, :count] = 0
        if drafts is not None:
            shape.first_A1, shape.num_decodes = first_A1, num_decodes
            if items.paths:
                index = {slot: n for n, slot in enumerate(items.decodes.slots.tolist())}
                shape.owners_P = np.array([index[path.slot] for path in items.paths], np.int64)
            if drafts.is_late is not None:
                head[IS_LATE, :num_decodes], shape.has_late = drafts.is_late, True
        return shape

    @staticmethod
    def _put_drafts(values: Ints, offsets: NDArray[np.int64], drafts: Drafts) -> None:
        """Write the token ids of decode rows; ``offsets``: each one's place in its row."""
        values[:] = FROM_TABLE - offsets
        if drafts.tokens is not None:
            values[offsets > 0] = drafts.tokens

    def _pack_even(self, items: Items, head: Ints, ints: Ints, size: int, width: int) -> StepShape:
        """Decodes with drafts, ``width`` tokens each, for a graph of ``size`` rows. Tokens behind
        COUNT are void: they are stored in page 0, and no draft is compared with what they draw."""
        drafts, decodes, starts = items.drafts, items.decodes, items.starts
        assert drafts is not None
        count = len(starts)
        slots = np.full(size, self.tables.dummy, np.int64)
        slots[:count] = decodes.slots
        offsets = np.arange(width)
        slots_R = np.repeat(slots[:count], width)
        rows = len(slots_R)
        head[SLOT, :size], head[ROPE_LEN, :size] = slots, self.tables.prompt_len[slots]
        head[START, :size] = head[COUNT, :size] = head[IS_LATE, :size] = 0
        head[START, :count], head[COUNT, :count] = starts, drafts.lens + 1
        head[IS_LATE, :count] = 0 if drafts.is_late is None else drafts.is_late
        head[SAMPLE_SLOT, :rows] = slots_R
        head[TOKEN, :rows] = token_R = np.arange(rows)
        is_draft_NW = offsets[1:] <= drafts.lens[:, None]
        next_NW = np.full((count, width), -1)
        next_NW[:, :-1] = np.where(is_draft_NW, token_R.reshape(count, width)[:, 1:], -1)
        head[NEXT_TOKEN, :rows] = next_NW.ravel()
        head[POSITION, :rows] = (starts[:, None] + offsets + 1).ravel()
        head[PARAMS:, :rows] = self.params.params_PS[:, slots_R]
        values = ints[self.num_head :][: size * width].reshape(size, width)
        values[:] = 0
        values[:, 0] = FROM_TABLE
        values[:count, 1:][is_draft_NW] = (
            np.broadcast_to(FROM_TABLE - offsets[1:], is_draft_NW.shape)[is_draft_NW]
            if drafts.tokens is None
            else drafts.tokens
        )
        kinds, num_tokens = self.params.kinds(decodes.slots), count * width
        shape = StepShape(
            count, num_tokens, 0, width, int(starts.max()) + width, slots_R, kinds, False
        )
        shape.first_A1 = np.arange(count + 1) * width
        shape.num_decodes, shape.num_padded = count, size * width
        return shape

    def _pack_updates(self, shape: StepShape, ints: Ints, at: int) -> int:
        """Append the changed entries of the page tables; how many integers are used then."""
        places = self.tables.changes()
        if not len(places):
            return at
        values = self.tables.pages.reshape(-1)[places]
        shape.num_updates = count = min(len(places), self.max_updates)
        ints[at : at + count] = places[:count]
        ints[at + count : at + 2 * count] = values[:count]
        if count < len(places):
            shape.extra_updates = (places[count:].astype(np.int32), values[count:])
        return at + 2 * count


class DeviceStepBuffer:
    """The buffer on the device, and views of its parts."""

    def __init__(self, ints: Tensor, packer: StepPacker) -> None:
        self.ints, self._packer = ints, packer
        self.head_FN = ints[: packer.num_head].view(FIELDS, -1)
        self._fields: dict[tuple[int, int], Tensor] = {}

    def copy(self) -> DeviceStepBuffer:
        """The table's numbers in a buffer of their own."""
        return DeviceStepBuffer(self.ints[: self._packer.num_head].clone(), self._packer)

    def field(self, field: int, count: int) -> Tensor:
        """int32 [count], a view; kept, as each step needs the same ones."""
        view = self._fields.get((field, count))
        if view is None:
            view = self._fields[field, count] = self.head_FN[field, :count]
        return view

    def params(self, count: int) -> Tensor:
        """int32 [NUM_PARAMS, count]: sampling parameters of the first rows, a view."""
        return self.head_FN[PARAMS:, :count]

    def tokens(self, shape: StepShape) -> Tensor:
        """int32 [T]: token ids, ``FROM_TABLE`` for those of the token table."""
        if shape.extra_tokens is not None:
            return torch.from_numpy(shape.extra_tokens).to(self.ints.device)
        at = self._packer.num_head
        return self.ints[at : at + shape.num_tokens]

    def tail(self, count: int) -> Tensor:
        """int32 [count]: the first numbers behind the table."""
        at = self._packer.num_head
        return self.ints[at : at + count]

    def updates(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Indices into the flat page tables, and the new values there."""
        at = self._packer.num_head + shape.num_tail_tokens
        end = at + shape.num_updates
        return self.ints[at:end], self.ints[end : end + shape.num_updates]
