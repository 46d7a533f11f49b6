"""Adapters of linear layers as two small kernels: ``h = A x``, then ``y += scale * (B h + bias)``.

Rows of a step are put into groups of one adapter each: a program reads the matrices once for up to
16 rows, and rows without an adapter have no program. The matrices stay where they were loaded; a
table of addresses, ranks and scales leads to them. A graph reads the table and the groups from
fixed places, so loading and unloading only writes there. A row has the same bits in any batch.

Legend: that of ``kernels/ops/lora.py``; G groups, M rows of a group, N layers (sites), P parts of a
layer, F fields of a part.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import replace
from radixlm.kernels.ops.lora import (
    AdapterPart,
    LoraLayout,
    LoraPart,
    LoraRows,
    PackedAdapter,
    Parts,
    ReferenceAdapter,
    ReferenceLoraRows,
)
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import cast as narrow
from radixlm.kernels.triton.mode import operand
from radixlm.kernels.triton.ops import register_triton

Ints = NDArray[np.int32]

ROWS = 16  # of a group: the fewest that tensor cores take
PARTS = 4  # of a layer that one adapter may have; with more it runs in torch there
_BLOCK_R = 16  # ranks are padded to a multiple of it
_BLOCK_BYTES = 256  # of a row's inputs
_STEPS = 4  # blocks of a segment of inputs, unless that makes more than _most_segments
_STAGES = 5  # blocks of inputs that are on their way, and one
_MANY_GROUPS = 32  # keep a GPU busy without a program for each segment

# fields of a part, int64; the scale as the bits of a float32
_A, _B, _VECTORS, _RANK, _FIRST, _COUNT, _SCALE = (tl.constexpr(field) for field in range(7))
_FIELDS = 8


@triton.jit(do_not_specialize=["entry_stride", "steps", "segments", "is_whole", "rank_blocks"])
def shrink_kernel(
    x_ptr, rows_ptr, entries_ptr, h_ptr, num_in, x_stride, entry_stride, steps, segments,
    is_whole, rank_blocks,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (group, part and block of its rank, segment): A x of one segment of the inputs, which
    are ``steps`` blocks; with ``is_whole`` of all segments, summed up in the same order."""
    group, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = entries_ptr + group * entry_stride + unit // rank_blocks * FIELDS
    first = unit % rank_blocks * BLOCK_R
    # all that does not depend on each other is loaded at once
    rank, address = tl.load(entry + _RANK), tl.load(entry + _A)
    row = tl.load(rows_ptr + group * ROWS + tl.arange(0, ROWS))
    if first < rank:
        a_ptr = tl.multiple_of(address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
        is_row = (row >= 0)[:, None]
        x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride
        a_at = a_ptr + (first + tl.arange(0, BLOCK_R)).to(tl.int64)[None, :] * num_in
        total = tl.zeros((ROWS, BLOCK_R), tl.float32)
        last = tl.where(is_whole != 0, segments, tl.program_id(2) + 1)
        for number in range(tl.program_id(2), last):
            h = tl.zeros((ROWS, BLOCK_R), tl.float32)
            end = tl.minimum((number + 1) * steps, tl.cdiv(num_in, BLOCK_K))
            for step in range(number * steps, end):
                k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                x = tl.load(x_at + k[None, :], mask=is_row & (k < num_in)[None, :], other=0.0)
                a = tl.load(a_at + k[:, None], mask=(k < num_in)[:, None], other=0.0)
                h = tl.dot(operand(x), operand(a), h, input_precision="tf32x3")
            total += h
        block = (group * tl.num_programs(1) + unit) * tl.num_programs(2) + tl.program_id(2)
        at = tl.arange(0, ROWS)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        tl.store(h_ptr + block * (ROWS * BLOCK_R) + at, total)


@triton.jit(do_not_specialize=["entry_stride", "rank_blocks"])
def expand_kernel(
    y_ptr, x_ptr, rows_ptr, entries_ptr, h_ptr, num_out, y_stride, entry_stride, rank_blocks,
    PARTS: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (group, block of outputs): add what each part gives, one after another. Of each block
    of h there are SUMS; B has the type of x, of which nothing is read."""
    group = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK_N
    row = tl.load(rows_ptr + group * ROWS + tl.arange(0, ROWS))
    r = tl.arange(0, BLOCK_R)
    h_at = tl.arange(0, ROWS)[:, None] * BLOCK_R + r[None, :]
    is_changed = False
    for part in tl.static_range(PARTS):
        entry = entries_ptr + group * entry_stride + part * FIELDS
        from_first = begin - tl.load(entry + _FIRST)
        is_changed |= (from_first < tl.load(entry + _COUNT)) & (from_first + BLOCK_N > 0)
    if is_changed:
        out = begin + tl.arange(0, BLOCK_N)
        mask = (row >= 0)[:, None] & (out < num_out)[None, :]
        y_at = y_ptr + row.to(tl.int64)[:, None] * y_stride + out[None, :]
        y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            entry = entries_ptr + group * entry_stride + part * FIELDS
            from_first = begin - tl.load(entry + _FIRST)
            count = tl.load(entry + _COUNT)
            if (from_first < count) & (from_first + BLOCK_N > 0):
                rank = tl.multiple_of(tl.load(entry + _RANK), BLOCK_R)
                b_ptr = tl.load(entry + _B).to(tl.pointer_type(x_ptr.dtype.element_ty))
                b_ptr = tl.multiple_of(b_ptr, 16)
                col = from_first + tl.arange(0, BLOCK_N)
                is_mine = (col >= 0) & (col < count)
                delta = tl.zeros((ROWS, BLOCK_N), tl.float32)
                for block in tl.range(0, rank // BLOCK_R, num_stages=1):
                    unit = (group * PARTS + part) * rank_blocks + block
                    sums_at = h_ptr + unit * (SUMS * ROWS * BLOCK_R) + h_at
                    h = tl.zeros((ROWS, BLOCK_R), tl.float32)
                    for number in tl.static_range(SUMS):
                        h += tl.load(sums_at + number * (ROWS * BLOCK_R))
                    b_at = b_ptr + col[None, :] * rank + block * BLOCK_R + r[:, None]
                    b = tl.load(b_at, mask=is_mine[None, :], other=0.0).to(tl.float32)
                    delta = tl.dot(h, b, delta, input_precision="tf32x3")
                scale = tl.load(entry + _SCALE).to(tl.int32).to(tl.float32, bitcast=True)
                vectors = tl.load(entry + _VECTORS)
                if vectors == 0:
                    y += scale * delta
                else:  # bias, gain and the layer's own bias
                    vector_at = vectors.to(tl.pointer_type(tl.float32)) + col
                    bias = tl.load(vector_at, mask=is_mine, other=0.0)[None, :]
                    gain = tl.load(vector_at + count, mask=is_mine, other=1.0)[None, :]
                    own = tl.load(vector_at + 2 * count, mask=is_mine, other=0.0)[None, :]
                    y = (y - own + scale * (delta + bias)) * gain + own
        tl.store(y_at, narrow(y, y_ptr.dtype.element_ty), mask=mask)


class TritonAdapter:
    """An adapter whose parts of some linear layers (``sites``) the kernels run: their ``fields``,
    int64 [N, P, F], on the device. ``rest``: what runs in torch."""

    def __init__(self, parts: Parts, layout: LoraLayout) -> None:
        self.sites = frozenset(
            site for site, of in parts.items() if site in layout.sites and len(of) <= PARTS
        )
        self.rest = ReferenceAdapter({s: of for s, of in parts.items() if s not in self.sites})
        self.dtype, self.max_rank = layout.dtype, _BLOCK_R
        self._keep: list[Tensor] = []  # the fields know addresses alone
        self._is_kept = False
        own = {site: [self._packed(part) for part in parts[site]] for site in self.sites}
        self.parts: Parts = {**self.rest.parts, **own}
        fields = np.zeros((1 + max(self.sites, default=0), PARTS, _FIELDS), np.int64)
        for site, of in own.items():
            for number, part in enumerate(of):
                fields[site, number, :-1] = _fields_of(part)
        self.fields = torch.from_numpy(fields).to(layout.where)
        if layout.where.type == "cuda":  # steps run on another stream
            torch.cuda.current_stream(layout.where).synchronize()

    def _packed(self, part: AdapterPart) -> LoraPart:
        """The part as the kernels read it: all three vectors, one after another, or none."""
        assert isinstance(part, LoraPart), "rows of a token table in a linear layer"
        (rank, num_in), count = part.a_RI.shape, len(part.b_OR)
        padded = _padded(rank)
        a_RI = part.a_RI.new_zeros(padded, num_in, dtype=self.dtype)
        b_OR = part.b_OR.new_zeros(count, padded, dtype=self.dtype)
        a_RI[:rank], b_OR[:, :rank] = part.a_RI, part.b_OR
        self.max_rank = max(self.max_rank, padded)
        self._keep += [a_RI, b_OR]
        packed = LoraPart(a_RI, b_OR, part.scale, part.first)
        if all(vector is None for vector in part.vectors):
            return packed
        zeros_O = b_OR.new_zeros(count, dtype=torch.float32)
        pairs = zip(part.vectors, (zeros_O, zeros_O + 1, zeros_O), strict=True)
        vectors_3O = torch.stack([other if one is None else one for one, other in pairs])
        self._keep.append(vectors_3O)
        bias_O, gain_O, own_O = vectors_3O
        return replace(packed, bias_O=bias_O, gain_O=gain_O, own_O=own_O)

    def keep_for_stream(self) -> None:
        """Have the memory, once freed, wait for what the stream of steps has been given by then."""
        if self.fields.is_cuda and not self._is_kept:
            stream = torch.cuda.current_stream(self.fields.device)
            for tensor in (self.fields, *self._keep):
                tensor.record_stream(stream)
            self._is_kept = True


def _padded(rank: int) -> int:
    return cdiv(rank, _BLOCK_R) * _BLOCK_R


def _fields_of(part: LoraPart) -> tuple[int, ...]:
    vectors = 0 if part.bias_O is None else part.bias_O.data_ptr()
    (scale,) = struct.unpack("i", struct.pack("f", part.scale))
    addresses = part.a_RI.data_ptr(), part.b_OR.data_ptr(), vectors
    return *addresses, part.rank, part.first, len(part.b_OR), scale


class Groups:
    """The rows of a step on the device: fields int64 [G, N, P, F] of each group's adapter, rows
    int32 [G, M], -1 for none. ``max_rank``, ``dtype``: of these adapters."""

    def __init__(
        self, fields_GNPF: Tensor, rows_GM: Tensor, max_rank: int, dtype: torch.dtype
    ) -> None:
        self._fields, self._rows, self._dtype = fields_GNPF, rows_GM, dtype
        self._num_blocks = _padded(max_rank) // _BLOCK_R

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """See LoraRows."""
        count, (num_in, num_out) = len(self._rows), (x_TI.shape[1], y_TO.shape[1])
        if not count:
            return
        x_TI = x_TI.to(self._dtype)
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        shrink = _shrink_constants(self._dtype)
        blocks = cdiv(num_in, shrink["BLOCK_K"])
        segments = min(_most_segments(self._dtype), next_power_of_2(cdiv(blocks, _STEPS)))
        has_many = count > _MANY_GROUPS
        num_sums, units = 1 if has_many else segments, PARTS * self._num_blocks
        fields, stride = self._fields[:, site], self._fields.stride(0)
        h = x_TI.new_empty(count, units, num_sums, ROWS, _BLOCK_R, dtype=torch.float32)
        steps = cdiv(blocks, segments)
        launch(
            shrink_kernel, (count, units, num_sums), (x_TI, self._rows, fields, h),
            (num_in, x_TI.stride(0), stride, steps, segments, int(has_many), self._num_blocks),
            **shrink, num_stages=_STAGES,
        )  # fmt: skip
        expand = _expand_constants(self._dtype, num_sums, has_many)
        launch(
            expand_kernel, (count, cdiv(num_out, expand["BLOCK_N"])),
            (y_TO, x_TI, self._rows, fields, h),
            (num_out, y_TO.stride(0), stride, self._num_blocks),
            **expand,
        )  # fmt: skip


def _shrink_constants(dtype: torch.dtype) -> dict[str, int]:
    block = _BLOCK_BYTES // dtype.itemsize
    return {"FIELDS": _FIELDS, "ROWS": ROWS, "BLOCK_R": _BLOCK_R, "BLOCK_K": block}


def _most_segments(dtype: torch.dtype) -> int:
    """A power of two; with 16 sums of single precision Triton 3.6 spills."""
    return 32 // dtype.itemsize


def _expand_constants(dtype: torch.dtype, num_sums: int, has_many: bool) -> dict[str, int]:
    return {
        "PARTS": PARTS, "FIELDS": _FIELDS, "ROWS": ROWS, "BLOCK_R": _BLOCK_R, "SUMS": num_sums,
        "BLOCK_N": 128 if has_many and dtype.itemsize == 2 else 64,
    }  # fmt: skip


def group_rows(adapter_T: Ints) -> tuple[Ints, Ints]:
    """The adapters of groups [G], and their rows [G, M] padded with -1. Rows of adapter -1 are in
    none."""
    order = np.argsort(adapter_T, kind="stable")
    order = order[np.count_nonzero(adapter_T < 0) :]
    adapters, first, counts = np.unique(adapter_T[order], return_index=True, return_counts=True)
    num_groups = -(-counts // ROWS)
    rows_GM = np.full((num_groups.sum(), ROWS), -1, np.int32)
    begin = (np.cumsum(num_groups) - num_groups) * ROWS
    rows_GM.reshape(-1)[np.arange(len(order)) + np.repeat(begin - first, counts)] = order
    return np.repeat(adapters, num_groups).astype(np.int32), rows_GM


class TritonLoraRows(ReferenceLoraRows):
    """Linear layers by the kernels, other sites in torch. ``adapter_T`` is on the host."""

    def __init__(
        self,
        adapters: Sequence[PackedAdapter],
        adapter_T: Tensor,
        where: torch.device | None = None,
    ) -> None:
        super().__init__(adapters, _uploaded(adapter_T, where))
        mine = cast(Sequence[TritonAdapter], adapters)
        self._rest = ReferenceLoraRows([adapter.rest for adapter in mine], self._adapter_T)
        num_sites = max(len(adapter.fields) for adapter in mine)
        adapters_G, rows_GM = group_rows(adapter_T.numpy())
        fields = self._adapter_T.new_zeros(len(mine), num_sites, PARTS, _FIELDS, dtype=torch.int64)
        for own, adapter in zip(fields, mine, strict=True):
            own[: len(adapter.fields)] = adapter.fields
            adapter.keep_for_stream()
        which_G, rows = (_uploaded(torch.from_numpy(one), where) for one in (adapters_G, rows_GM))
        max_rank = max(adapter.max_rank for adapter in mine)
        self._groups = Groups(fields.index_select(0, which_G), rows, max_rank, mine[0].dtype)
        self._sites = frozenset().union(*(adapter.sites for adapter in mine))

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor, block: int = 0) -> None:
        """See kernels/ops/lora.py."""
        if site in self._sites:
            self._groups.add_(site, x_TI, y_TO)
        self._rest.add_(site, x_TI, y_TO, block)

    def select(self, rows_R: Tensor) -> LoraRows:
        """See kernels/ops/lora.py. Which rows they are, only the device knows: they run in
        torch."""
        numbers_R = torch.where(rows_R < 0, -1, self._adapter_T[rows_R])
        return ReferenceLoraRows(self._adapters, numbers_R)


def _uploaded(host: Tensor, where: torch.device | None) -> Tensor:
    """A copy that the host does not wait for."""
    if where is None or where.type != "cuda":
        return host
    return host.pin_memory().to(where, non_blocking=True)


class TritonLoraSlots:
    """See LoraSlots. The last row of the table is of no adapter."""

    def __init__(self, layout: LoraLayout, max_tokens: int) -> None:
        self._layout, self.num_slots = layout, layout.max_adapters
        count, where = layout.max_adapters, layout.where
        shape = (count + 1, 1 + max(layout.sites, default=0), PARTS, _FIELDS)
        self._table = torch.zeros(shape, dtype=torch.int64, device=where)
        self._num_groups = self._most_groups(max_tokens)
        num_ints = self._num_groups * (1 + ROWS)
        self.ints = torch.full((num_ints,), count, dtype=torch.int32, device=where)

    def _most_groups(self, num_tokens: int) -> int:
        """Groups of so many rows at most, each group but one of an adapter being full."""
        return min(num_tokens, (num_tokens + (ROWS - 1) * self._layout.max_adapters) // ROWS)

    def takes(self, adapter: PackedAdapter) -> bool:
        """See LoraSlots."""
        mine = cast(TritonAdapter, adapter)
        return not mine.rest.parts and mine.max_rank <= _padded(self._layout.max_rank)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """See LoraSlots."""
        mine = cast(TritonAdapter, adapter)
        self._table[slot].zero_()
        self._table[slot, : len(mine.fields)] = mine.fields
        mine.keep_for_stream()

    def fill(self, slot_T: Ints, host: Tensor) -> None:
        """See LoraSlots."""
        slots_G, rows_GM = group_rows(slot_T)
        ints, count = host.numpy(), len(slots_G)
        ints[: self._num_groups] = self._layout.max_adapters
        ints[:count] = slots_G
        ints[self._num_groups :][: count * ROWS] = rows_GM.reshape(-1)

    def rows(self, num_tokens: int) -> LoraRows:
        """See LoraSlots."""
        count = self._most_groups(num_tokens)
        fields = self._table.index_select(0, self.ints[:count])
        rows_GM = self.ints[self._num_groups :].view(-1, ROWS)[:count]
        groups = Groups(fields, rows_GM, self._layout.max_rank, self._layout.dtype)
        return _RecordedRows(groups, self._layout.sites, num_tokens)


class _RecordedRows(ReferenceLoraRows):
    """Rows of a graph: adapters of linear layers, whichever they are when it is launched."""

    def __init__(self, groups: Groups, sites: frozenset[int], num_tokens: int) -> None:
        super().__init__((), torch.empty(num_tokens, device="meta"))
        self._groups, self._sites = groups, sites

    def has(self, site: int) -> bool:
        """See kernels/ops/lora.py."""
        return site in self._sites

    def select(self, rows_R: Tensor) -> LoraRows:
        """See kernels/ops/lora.py."""
        return ReferenceLoraRows((), rows_R)  # nothing changes the head

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor, block: int = 0) -> None:
        """See kernels/ops/lora.py."""
        if site in self._sites:
            self._groups.add_(site, x_TI, y_TO)


for _op, _function in {
    "pack_adapter": TritonAdapter,
    "lora_rows": TritonLoraRows,
    "lora_slots": TritonLoraSlots,
}.items():
    register_triton(_op, _function)
