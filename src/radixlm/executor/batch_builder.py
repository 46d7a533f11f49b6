"""BatchBuilder: makes a ForwardBatch of a packed step, on the device. Every tensor is a view of the
step's buffer or is computed from it. The same code serves all devices.

Legend: S sequences, T tokens, P pages, R rows of logits.
"""

import torch
from torch import Tensor

from radixlm.executor import step_layout as layout
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.step_layout import DeviceStepBuffer, StepShape
from radixlm.sampling.drafts import DraftRows
from radixlm.step.batch import AttentionRunner, ForwardBatch


class BatchBuilder:
    """Makes the batches of steps. ``space_of_group[g]``: the page table that KV group g reads."""

    def __init__(
        self,
        tables: DeviceTables,
        buffer: DeviceStepBuffer,
        space_of_group: tuple[int, ...],
        page_size: int,
        attn: AttentionRunner,
    ) -> None:
        self._tables, self._buffer, self._attn = tables, buffer, attn
        self._spaces, self.page_size = space_of_group, page_size
        self._rows = torch.arange(buffer.head_FN.shape[1], device=tables.device)
        is_power = page_size & (page_size - 1) == 0
        self._shift = page_size.bit_length() - 1 if is_power else None

    def update_tables(self, shape: StepShape) -> None:
        """Write the changed entries to the device's page tables."""
        flat = self._tables.device_pages.view(-1)
        if shape.num_updates:
            indices, values = self._buffer.updates(shape)
            flat.index_put_((indices.long(),), values)
        if shape.extra_updates is not None:
            parts = (torch.from_numpy(part).to(flat.device) for part in shape.extra_updates)
            indices, values = parts
            flat.index_put_((indices.long(),), values)

    def decodes(self, count: int, max_kv_len: int) -> ForwardBatch:
        """A step of ``count`` sequences that take their token from the token table and emit one. It
        depends on nothing but the two arguments, so that it can be part of a graph."""
        buffer = self._buffer
        columns_3S = buffer.head_FN[layout.SLOT : layout.ROPE_LEN + 1, :count].long()
        slots_S, positions_S, rope_len_S = columns_3S.unbind(0)
        pages, store = self._locate(slots_S, slots_S, positions_S, max_kv_len)
        first_S1 = buffer.field(layout.FIRST_TOKEN, count + 1)
        return ForwardBatch(
            token_ids_T=self._tables.next_token[slots_S],
            positions_T=positions_S,
            rope_len_T=rope_len_S,
            query_start_S1=first_S1,
            kv_len_S=buffer.field(layout.KV_LEN, count),
            page_table_GSP=pages,
            store_GT=store,
            logits_rows_R=self._rows[:count],
            attn=self._attn,
            max_query_len=1,
            max_kv_len=max_kv_len,
            is_decode=True,
        )

    def mixed(self, shape: StepShape) -> ForwardBatch:
        """Any step, of chunks and decodes, with or without drafts."""
        buffer = self._buffer
        if shape.has_late:
            self._settle(shape.num_sequences, shape.num_rows)
        rows_R = buffer.field(layout.TOKEN, shape.num_rows).long()
        ids_T = buffer.tokens(shape).long()
        return self._packed(
            shape.num_sequences, ids_T, rows_R, shape.max_query_len, shape.max_kv_len
        )

    def filled(self, count: int, num_tokens: int, max_kv_len: int) -> ForwardBatch:
        """A step of chunks and decodes that ``StepPacker`` has filled up to ``num_tokens`` tokens
        of ``count`` sequences, for a graph. It depends on nothing but the arguments."""
        ids_T = self._buffer.tail(num_tokens).long()
        rows_R = self._buffer.field(layout.TOKEN, count).long()
        return self._packed(count, ids_T, rows_R, num_tokens, max_kv_len)

    def _packed(
        self, count: int, ids_T: Tensor, rows_R: Tensor, max_query_len: int, max_kv_len: int
    ) -> ForwardBatch:
        buffer, device, num_tokens = self._buffer, self._tables.device, len(ids_T)
        columns_4S = buffer.head_FN[layout.SLOT : layout.COUNT + 1, :count].long()
        slots_S, start_S, rope_len_S, counts_S = columns_4S.unbind(0)
        first_S1 = buffer.field(layout.FIRST_TOKEN, count + 1)
        seq_T = torch.repeat_interleave(
            torch.arange(count, device=device), counts_S, output_size=num_tokens
        )
        offset_S = start_S - first_S1[:count]
        positions_T = torch.arange(num_tokens, device=device) + offset_S[seq_T]
        slots_T = slots_S[seq_T]
        pages, store = self._locate(slots_S, slots_T, positions_T, max_kv_len)
        return ForwardBatch(
            token_ids_T=self._known(ids_T, slots_T),
            positions_T=positions_T,
            # prompt tokens are rotated as at the end of the prompt, output tokens as when they were
            # sampled: the same whether a token is computed first, in chunks, or again
            rope_len_T=torch.maximum(positions_T + 1, rope_len_S[seq_T]),
            query_start_S1=first_S1,
            kv_len_S=buffer.field(layout.KV_LEN, count),
            page_table_GSP=pages,
            store_GT=store,
            logits_rows_R=rows_R,
            attn=self._attn,
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            prompt_len_S=rope_len_S,
        )

    def drafted(self, count: int, width: int, max_kv_len: int) -> ForwardBatch:
        """A step of ``count`` decodes of ``width`` tokens each, as ``StepPacker`` packs them for a
        graph. It depends on nothing but the arguments."""
        buffer, device = self._buffer, self._tables.device
        self._settle(count, count * width)
        columns_4S = buffer.head_FN[layout.SLOT : layout.COUNT + 1, :count].long()
        slots_S, start_S, rope_len_S, counts_S = columns_4S.unbind(0)
        offset_W = torch.arange(width, device=device)
        positions_T = (start_S[:, None] + offset_W).flatten()
        slots_T = slots_S.repeat_interleave(width)
        is_void_T = (offset_W >= counts_S[:, None]).flatten()
        ids_T = buffer.tail(count * width).long()
        pages, store = self._locate(slots_S, slots_T, positions_T, max_kv_len)
        return ForwardBatch(
            token_ids_T=self._known(ids_T, slots_T),
            positions_T=positions_T,
            rope_len_T=torch.maximum(positions_T + 1, rope_len_S.repeat_interleave(width)),
            query_start_S1=(self._rows[: count + 1] * width).int(),
            kv_len_S=(start_S + width).int(),
            page_table_GSP=pages,
            store_GT=tuple(one.masked_fill(is_void_T, 0) for one in store),
            logits_rows_R=self._rows[: count * width],
            attn=self._attn,
            max_query_len=width,
            max_kv_len=max_kv_len,
            prompt_len_S=rope_len_S,
        )

    def _known(self, ids_T: Tensor, slots_T: Tensor) -> Tensor:
        """Token ids; the negative ones are read from the token table."""
        row_T = (layout.FROM_TABLE - ids_T).clamp_(min=0)
        return torch.where(ids_T < 0, self._tables.known[row_T, slots_T], ids_T)

    def _settle(self, count: int, rows: int) -> None:
        """Subtract refused drafts from the places of late sequences."""
        head, buffer = self._buffer.head_FN, self._buffer
        slots_S = buffer.field(layout.SLOT, count).long()
        shift_S = buffer.field(layout.IS_LATE, count) * self._tables.num_refused[slots_S]
        head[layout.START, :count] -= shift_S
        head[layout.KV_LEN, :count] -= shift_S
        shift_of = torch.zeros_like(self._tables.num_refused).index_copy_(0, slots_S, shift_S)
        head[layout.POSITION, :rows] -= shift_of[buffer.field(layout.SAMPLE_SLOT, rows).long()]

    def draft_rows(self, shape: StepShape) -> DraftRows | None:
        """The rows of logits of a step with drafts."""
        if shape.first_A1 is None:
            return None
        rows, buffer = shape.num_rows, self._buffer
        next_R, slots_R = (
            buffer.field(one, rows).long() for one in (layout.NEXT_TOKEN, layout.SAMPLE_SLOT)
        )
        ids_R = self._known(buffer.tokens(shape)[next_R.clamp(min=0)].long(), slots_R)
        return DraftRows(shape.first_A1, torch.where(next_R < 0, -1, ids_R), shape.owners_P)

    def _locate(
        self, slots_S: Tensor, slots_T: Tensor, positions_T: Tensor, max_kv_len: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Page tables [S, P] and store indices of the tokens' K and V, for each group."""
        size = self.page_size
        width = min(-(-max_kv_len // size), self._tables.max_pages)
        if self._shift is None:
            column_T, offset_T = positions_T // size, positions_T % size
        else:
            column_T, offset_T = positions_T >> self._shift, positions_T & (size - 1)
        pages, store = [], []
        for table in self._tables.device_pages:
            pages.append(table[:, :width].index_select(0, slots_S))
            store.append(torch.add(offset_T, table[slots_T, column_T], alpha=size))
        return tuple(pages[s] for s in self._spaces), tuple(store[s] for s in self._spaces)
