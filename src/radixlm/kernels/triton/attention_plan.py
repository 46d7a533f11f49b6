"""Who computes what in a step of paged attention, decided on the device: a CUDA graph replays the
same grid whatever the lengths are.

A unit of work is a block of query tokens of a sequence and a part ("split") of what it reads. The
plan kernel cuts so that the units of a step, over all KV heads, are about ``workers``: long
sequences get more splits than short ones. It writes which unit each program takes; programs
beyond the last unit return at once.

Legend: S sequences, U units.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton import mode  # noqa: F401  (before any kernel is made)
from radixlm.kernels.triton.variant import Variant

OWN_SPLITS = 32  # most splits of a sequence where its neighbours have no say
UNBOUNDED = 1 << 30
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


_VIEWS = ["query_start", "kv_len", "unit_row", "unit_number", "splits", "split_len", "num_units"]
_SIZES = ["num_rows", "fewest", "most", "workers", "least_len", "span", "own_splits"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VIEWS)
def plan_kernel(
    query_start, kv_len, unit_row, unit_number, splits, split_len, num_units,
    num_rows, fewest, most, workers, least_len, span, own_splits,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows with ``fewest`` to ``most`` query tokens, in blocks of TOKENS. What a block reads is at
    most ``span`` long and is cut into parts of a multiple of KEYS, at least ``least_len``.
    ``own_splits`` > 0: the cut depends on the row's own length only. Rows of a token or none
    (padding of a graph) take a unit each and change nobody's cut."""
    row = tl.arange(0, BLOCK)
    live = row < num_rows
    first = tl.load(query_start + row, mask=live, other=0)
    last = tl.load(query_start + row + 1, mask=live, other=0)
    length = tl.load(kv_len + row, mask=live, other=0)
    length = tl.minimum(length, span)
    queries = last - first
    takes = live & (queries >= fewest) & (queries <= most)
    blocks = tl.where(takes, (queries + TOKENS - 1) // TOKENS, 0)
    counted = tl.where(length > KEYS, length, 0)  # the rest, padding too, is never cut
    total = tl.sum(blocks.to(tl.int64) * counted)
    share = ((total + workers - 1) // workers).to(tl.int32)
    own = (length + own_splits - 1) // tl.maximum(own_splits, 1)
    part = tl.where(own_splits > 0, own, share)
    part = (tl.maximum(part, least_len) + KEYS - 1) // KEYS * KEYS
    parts = tl.where(takes, tl.maximum((length + part - 1) // part, 1), 0)
    units = blocks * parts
    begin = tl.cumsum(units, 0) - units
    tl.store(num_units, tl.sum(units))
    tl.store(splits + row, parts, mask=live)
    tl.store(split_len + row, part, mask=live)
    for number in range(tl.max(units)):
        tl.store(unit_row + begin + number, row, mask=number < units)
        tl.store(unit_number + begin + number, number, mask=number < units)


@dataclass(frozen=True, slots=True)
class Work:
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


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step is cut. ``fewest`` to ``most``: query tokens of the sequences that take part;
    ``tokens``: of a block; ``keys``: of a tile; ``workers``: units wanted of all sequences;
    ``least_len``: tokens of a split; ``span``: most tokens that a block reads."""

    tokens: int
    keys: int
    workers: int
    least_len: int
    span: int = UNBOUNDED
    fewest: int = 1
    most: int = UNBOUNDED
    own_splits: int = 0

    def max_units(self, num_tokens: int, num_rows: int) -> int:
        """Most units that a step of so many tokens and sequences can have."""
        blocks = num_rows + max(0, num_tokens - num_rows) // self.tokens
        if self.least_len >= UNBOUNDED:
            return blocks
        return blocks * self.own_splits if self.own_splits else blocks + self.workers


def make_plan(work: Work, query_start_S1: Tensor, kv_len_S: Tensor, cut: Cut) -> None:
    """Fill ``work``; nothing waits for the device."""
    num_rows = kv_len_S.shape[0]
    block = triton.next_power_of_2(num_rows)
    plan_kernel[(1,)](
        query_start_S1, kv_len_S, work.unit_row_U, work.unit_number_U, work.splits_S,
        work.split_len_S, work.num_units_1, num_rows, cut.fewest, cut.most, cut.workers,
        cut.least_len, cut.span, cut.own_splits,
        TOKENS=cut.tokens, KEYS=cut.keys, BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(16, max(4, block // 128))


def variants() -> tuple[Variant, ...]:
    """Numbers of sequences up to 2048 (more work, with a few spilled registers once a step); blocks
    of tokens and tiles of keys make no difference."""
    signature = dict.fromkeys(_VIEWS, "*i32:1") | dict.fromkeys(_SIZES, "i32")
    return tuple(
        Variant(
            f"plan-{block}",
            plan_kernel,
            signature,
            {"TOKENS": 32, "KEYS": 64, "BLOCK": block},
            num_warps=_num_warps(block),
            num_stages=3,
        )
        for block in _BLOCKS
    )
