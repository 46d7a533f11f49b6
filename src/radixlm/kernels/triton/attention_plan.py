"""Divides a step of paged attention into units of work on the device, so that a CUDA graph can
replay the same grid for any lengths.

A unit of work is a block of query tokens of a sequence and a part ("split") of what it reads. The
plan kernel splits so that a step has about ``workers`` units over all KV heads: long sequences get
more splits than short ones. It writes the unit of each program; programs after the last unit return
at once.

Legend: S sequences, U units.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from radixlm.base.record import Record
from radixlm.kernels.triton import mode  # noqa: F401  (before any kernel is made)
from radixlm.kernels.triton.launch import launch

UNBOUNDED = 1 << 30
_FEW, _MANY = 256, 1024  # sequences that the kernel takes at a time, in steps of few and of many

_VIEWS = ["query_start", "kv_len", "unit_row", "unit_number", "splits", "split_len", "num_units"]
_SIZES = ["num_rows", "min_queries", "max_queries", "workers", "min_split_len", "span",
          "tokens", "keys"]  # fmt: skip


@triton.jit
def _rows(
    query_start, kv_len, row, num_rows, min_queries, max_queries, span, tokens,
):  # fmt: skip
    """Of some sequences: (blocks of query tokens, 0 where they take no part; tokens read)."""
    live = row < num_rows
    first = tl.load(query_start + row, mask=live, other=0)
    queries = tl.load(query_start + row + 1, mask=live, other=0) - first
    length = tl.minimum(tl.load(kv_len + row, mask=live, other=0), span)
    takes = live & (queries >= min_queries) & (queries <= max_queries)
    return tl.where(takes, (queries + tokens - 1) // tokens, 0), length


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VIEWS)
def plan_kernel(
    query_start, kv_len, unit_row, unit_number, splits, split_len, num_units,
    num_rows, min_queries, max_queries, workers, min_split_len, span, tokens, keys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows with ``min_queries`` to ``max_queries`` query tokens, in blocks of ``tokens``. What a
    block reads is up to ``span`` long and is cut into parts of a multiple of ``keys``, at least
    ``min_split_len``. Rows of a token or none (padding of a graph) take a unit each and change
    nobody's cut. BLOCK rows at a time."""
    lane = tl.arange(0, BLOCK)
    read = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, num_rows, BLOCK):
        blocks, length = _rows(
            query_start, kv_len, begin + lane, num_rows, min_queries, max_queries, span, tokens
        )
        counted = tl.where(length > keys, length, 0)  # the rest, padding too, is never cut
        read += blocks.to(tl.int64) * counted
    share = ((tl.sum(read) + workers - 1) // workers).to(tl.int32)
    done = 0
    for begin in range(0, num_rows, BLOCK):
        row = begin + lane
        blocks, length = _rows(
            query_start, kv_len, row, num_rows, min_queries, max_queries, span, tokens
        )
        part = (tl.maximum(share, min_split_len) + keys - 1) // keys * keys
        parts = tl.where(blocks > 0, tl.maximum((length + part - 1) // part, 1), 0)
        tl.store(splits + row, parts, mask=row < num_rows)
        tl.store(split_len + row, part, mask=row < num_rows)
        units = blocks * parts
        unit = done + tl.cumsum(units, 0) - units
        for number in range(tl.max(units)):
            tl.store(unit_row + unit + number, row, mask=number < units)
            tl.store(unit_number + unit + number, number, mask=number < units)
        done += tl.sum(units)
    tl.store(num_units, done)


class Work(Record):
    """A plan: int32 tensors on the device."""

    unit_row_U: Tensor  # which sequence
    unit_number_U: Tensor  # which of the sequence's blocks and splits: block * splits + split
    splits_S: Tensor
    split_len_S: Tensor  # tokens
    num_units_1: Tensor

    @staticmethod
    def num_numbers(num_units: int, num_rows: int) -> int:
        """int32 numbers of a plan."""
        return 2 * num_units + 2 * num_rows + 1

    @classmethod
    def within(cls, memory: Tensor, num_units: int, num_rows: int) -> Work:
        """A plan in the first of some int32 numbers."""
        whole = memory[: cls.num_numbers(num_units, num_rows)]
        return cls(*whole.split([num_units, num_units, num_rows, num_rows, 1]))


class Cut(Record):
    """How a step is cut. ``min_queries`` to ``max_queries``: query tokens of the sequences that
    take part; ``tokens``: of a block; ``keys``: of a tile; ``workers``: units wanted of all
    sequences; ``min_split_len``: tokens of a split; ``span``: largest number of tokens that a block
    reads."""

    tokens: int
    keys: int
    workers: int
    min_split_len: int
    span: int = UNBOUNDED
    min_queries: int = 1
    max_queries: int = UNBOUNDED

    def max_units(self, num_tokens: int, num_rows: int) -> int:
        """The largest number of units that a step of so many tokens and sequences can have."""
        blocks = num_rows + max(0, num_tokens - num_rows) // self.tokens
        if self.min_split_len >= UNBOUNDED:
            return blocks
        return blocks + self.workers


def make_plan(work: Work, query_start_S1: Tensor, kv_len_S: Tensor, cut: Cut) -> None:
    """Fill ``work``; nothing waits for the device."""
    num_rows = kv_len_S.shape[0]
    block = _FEW if num_rows <= _FEW else _MANY
    launch(
        plan_kernel, (1,),
        (query_start_S1, kv_len_S, work.unit_row_U, work.unit_number_U, work.splits_S,
         work.split_len_S, work.num_units_1),
        (num_rows, cut.min_queries, cut.max_queries, cut.workers, cut.min_split_len, cut.span,
         cut.tokens, cut.keys),
        BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return block // 64
