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
from radixlm.step.plan import DecodeBatch, Drafts, Items
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


class DecodeTemplate(Record):
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
        self._template: DecodeTemplate | None = None

    def pack(self, items: Items, host: Tensor) -> tuple[StepShape, int]:
        """Fill ``host``; the step's shape, and how many of the integers are used."""
        if items.prefills or items.drafts is not None:
            shape = self.pack_mixed(items, host)
        else:
            shape = self.pack_decodes(items, host)
        return shape, self.pack_updates(shape, host)

    def head(self, host: Tensor) -> Ints:
        """The table [FIELDS, rows] in ``host``, a view."""
        return host.numpy()[: self.num_head].reshape(FIELDS, -1)

    def pack_decodes(self, items: Items, host: Tensor, num_padded: int = 0) -> StepShape:
        """Fill the table, with rows of the dummy slot up to ``num_padded``."""
        head = self.head(host)
        decodes, after = items.decodes, items.starts + 1
        count = len(after)
        rows = max(count, num_padded)
        template = self._template
        if (
            template is None
            or template.decodes is not decodes
            or template.head.shape[1] != rows + 1
        ):
            template = self._template = self.make_template(decodes, rows)
        head[:, : rows + 1] = template.head
        head[START, :count] = items.starts
        head[KV_LEN, :count] = head[POSITION, :count] = after
        np.maximum(after, template.prompt_len[:count], out=head[ROPE_LEN, :count], casting="unsafe")
        max_kv_len = int(after.max())
        return StepShape(
            count, count, 0, 1, max_kv_len, template.slots_R, template.kinds, is_decode=True
        )

    def make_template(self, decodes: DecodeBatch, rows: int) -> DecodeTemplate:
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
        return DecodeTemplate(decodes, head, slots[: len(decodes.slots)], prompt_len, kinds)

    def pack_mixed(self, items: Items, host: Tensor) -> StepShape:
        """Fill the table and the token ids of any step."""
        head, others, count = self.head(host), items.others, len(items)
        slots = np.append(items.decodes.slots, [item.slot for item in others]).astype(np.int64)
        start = np.append(items.starts, [item.start for item in others]).astype(np.int32)
        counts, num_rows = token_counts(items)
        first = head[FIRST_TOKEN]
        first[0] = 0
        np.cumsum(counts, out=first[1 : count + 1])
        head[SLOT, :count], head[START, :count], head[COUNT, :count] = slots, start, counts
        if items.paths:
            head[SLOT, count - len(items.paths) : count] = [path.page_row for path in items.paths]
        head[KV_LEN, :count] = start + counts
        head[ROPE_LEN, :count] = self.tables.prompt_len[slots]
        head[IS_LATE, :count] = 0
        sequence_R = np.repeat(np.arange(count), num_rows)
        sampled_slots, rows = slots[sequence_R], len(sequence_R)
        # the rows of a sequence are its last tokens
        from_end_R = np.cumsum(num_rows)[sequence_R] - np.arange(rows)
        head[TOKEN, :rows] = token_R = first[1:][sequence_R] - from_end_R
        head[NEXT_TOKEN, :rows] = np.where(from_end_R > 1, token_R + 1, -1)
        head[SAMPLE_SLOT, :rows] = sampled_slots
        head[POSITION, :rows] = (start + counts)[sequence_R] - from_end_R + 1
        head[PARAMS:, :rows] = self.params.params_PS[:, sampled_slots]
        num_tokens, kinds = int(first[count]), self.params.kinds(sampled_slots)
        most = int(counts.max()), int((start + counts).max())
        shape = StepShape(count, num_tokens, 0, *most, sampled_slots, kinds, is_decode=False)
        if num_tokens <= self.max_tokens:
            values = host.numpy()[self.num_head :][:num_tokens]
        else:
            values = shape.extra_tokens = np.empty(num_tokens, np.int32)
        _put_tokens(values, items, first, counts)
        if items.drafts is not None:
            shape.first_A1 = np.append(0, np.cumsum(num_rows[num_rows > 0]))
            self._note_drafts(shape, items, items.drafts, head)
        return shape

    @staticmethod
    def _note_drafts(shape: StepShape, items: Items, drafts: Drafts, head: Ints) -> None:
        """Set what the shape and the table tell of drafts besides their rows."""
        shape.num_decodes = num_decodes = len(items.starts)
        if items.paths:
            index = {slot: n for n, slot in enumerate(items.decodes.slots.tolist())}
            shape.owners_P = np.array([index[path.slot] for path in items.paths], np.int64)
        if drafts.is_late is not None:
            head[IS_LATE, :num_decodes], shape.has_late = drafts.is_late, True

    def pack_updates(self, shape: StepShape, host: Tensor) -> int:
        """Append the changed entries of the page tables; how many integers are used then."""
        ints, at = host.numpy(), self.num_head + shape.num_tail_tokens
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


def token_counts(items: Items) -> tuple[Ints, Ints]:
    """Tokens and rows of logits of each sequence."""
    others, num_decodes = items.others, len(items.starts)
    counts = np.ones(len(items), np.int32)
    if items.drafts is not None:
        counts[:num_decodes] += items.drafts.lens
    num_rows = counts.copy()
    counts[num_decodes:] = [item.count for item in others]
    num_rows[num_decodes:] = [item.emit if item.page_row < 0 else item.count for item in others]
    return counts, num_rows


def _put_tokens(values: Ints, items: Items, first: Ints, counts: Ints) -> None:
    """Write the token ids of a step; ``first``: the first token of each sequence."""
    drafts, num_decodes = items.drafts, len(items.starts)
    values[:] = FROM_TABLE
    if drafts is not None:
        places = np.repeat(first[:num_decodes], counts[:num_decodes])
        offsets = np.arange(first[num_decodes]) - places  # of each token in its row
        of_rows = values[: len(offsets)]
        of_rows[:] = FROM_TABLE - offsets
        if drafts.tokens is not None:
            of_rows[offsets > 0] = drafts.tokens
    for item, begin in zip(items.others, first[num_decodes : len(counts)].tolist(), strict=True):
        if item.tokens is not None:
            values[begin : begin + item.count] = plain_ids(item.tokens)


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
        """int32 [NUM_PARAMS, count]: sampling parameters of the first rows, a view; kept too."""
        view = self._fields.get((PARAMS, count))
        if view is None:
            view = self._fields[PARAMS, count] = self.head_FN[PARAMS:, :count]
        return view

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
