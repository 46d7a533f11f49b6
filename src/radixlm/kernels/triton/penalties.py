"""Penalties, logit biases and suppressed tokens before the draw, and the counts of drawn tokens. A
table holds the addresses of each row's lists and counts, so nothing is gathered and rows without
them cost nothing.

Legend: R rows, V vocabulary, A columns of the table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.bitmask import is_forbidden
from radixlm.kernels.triton.launch import cdiv, launch

# columns of a row of the table, int64. Addresses are of device memory, 0 for none.
COLUMNS = (
    "seen",  # bool [V]: tokens of prompt and output
    "counts",  # int32 [V]: of output tokens
    "values",  # float32 [3]: repetition, frequency, presence
    "bias_ids",  # int64
    "bias_values",  # float32
    "num_bias",
    "suppressed_ids",  # int64: suppressed tokens, each once
    "num_suppressed",
    "suppressed_until",  # the first position where they are allowed
    "drafts",  # int64: tokens before the row that are not counted yet
    "num_drafts",
)
_NUM_COLUMNS = len(COLUMNS)
NUM_COLUMNS = tl.constexpr(_NUM_COLUMNS)
SEEN, COUNTS, VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BIAS_IDS, BIAS_VALUES, NUM_BIAS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
SUPPRESSED_IDS, NUM_SUPPRESSED, SUPPRESSED_UNTIL = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
DRAFTS, NUM_DRAFTS = tl.constexpr(9), tl.constexpr(10)
_BLOCK = 2048
_LIST = 128


@triton.jit(do_not_specialize=["mask_stride"])
def penalty_kernel(
    logits_ptr, rows_ptr, mask_ptr, vocab, logits_stride, mask_stride,
    MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i): a block of row r. Penalties, and the grammar's mask (they commute)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    at = logits_ptr + row * logits_stride + token
    if MASK:
        is_out = is_forbidden(mask_ptr + row * mask_stride, token, inside)
        tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_out)
        inside = inside & (is_out == 0)
    rows_ptr += row * NUM_COLUMNS
    seen_ptr = tl.load(rows_ptr + SEEN)
    if seen_ptr != 0:
        seen = tl.load(seen_ptr.to(tl.pointer_type(tl.int8)) + token, mask=inside, other=0) != 0
        counts_ptr = tl.load(rows_ptr + COUNTS).to(tl.pointer_type(tl.int32))
        values_ptr = tl.load(rows_ptr + VALUES).to(tl.pointer_type(tl.float32))
        count = tl.load(counts_ptr + token, mask=seen, other=0)
        drafts_ptr = tl.load(rows_ptr + DRAFTS).to(tl.pointer_type(tl.int64))
        for i in range(tl.load(rows_ptr + NUM_DRAFTS)):
            count += (inside & (token == tl.load(drafts_ptr + i))).to(tl.int32)
        seen = seen | (count > 0)
        repetition = tl.load(values_ptr)
        x = tl.load(at, mask=seen, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x -= tl.load(values_ptr + 1) * count.to(tl.float32)
        x -= tl.where(count > 0, tl.load(values_ptr + 2), 0.0)
        tl.store(at, x, mask=seen)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def list_kernel(
    logits_ptr, rows_ptr, positions_ptr, vocab, logits_stride,
    BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Program r: the biases of row r, then its suppressed tokens, unless nothing else
    is allowed."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    rows_ptr += row * NUM_COLUMNS
    num_bias = tl.load(rows_ptr + NUM_BIAS)
    if num_bias > 0:
        ids_ptr = tl.load(rows_ptr + BIAS_IDS).to(tl.pointer_type(tl.int64))
        values_ptr = tl.load(rows_ptr + BIAS_VALUES).to(tl.pointer_type(tl.float32))
        for first in range(0, num_bias, LIST):
            index = first + tl.arange(0, LIST)
            inside = index < num_bias
            at = logits_ptr + tl.load(ids_ptr + index, mask=inside, other=0)
            bias = tl.load(values_ptr + index, mask=inside, other=0.0)
            tl.store(at, tl.load(at, mask=inside, other=0.0) + bias, mask=inside)
        tl.debug_barrier()  # other threads read below what some wrote here
    num_suppressed = tl.load(rows_ptr + NUM_SUPPRESSED)
    if (num_suppressed > 0) & (tl.load(positions_ptr + row) < tl.load(rows_ptr + SUPPRESSED_UNTIL)):
        ids_ptr = tl.load(rows_ptr + SUPPRESSED_IDS).to(tl.pointer_type(tl.int64))
        allowed_L = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
            allowed_L += (x > float("-inf")).to(tl.int32)
        suppressed_L = tl.zeros((LIST,), tl.int32)
        for first in range(0, num_suppressed, LIST):
            index = first + tl.arange(0, LIST)
            inside = index < num_suppressed
            at = logits_ptr + tl.load(ids_ptr + index, mask=inside, other=0)
            x = tl.load(at, mask=inside, other=float("-inf"))
            suppressed_L += (x > float("-inf")).to(tl.int32)
        if tl.sum(allowed_L, 0) > tl.sum(suppressed_L, 0):
            for first in range(0, num_suppressed, LIST):
                index = first + tl.arange(0, LIST)
                inside = index < num_suppressed
                at = logits_ptr + tl.load(ids_ptr + index, mask=inside, other=0)
                tl.store(at, tl.full((LIST,), float("-inf"), tl.float32), mask=inside)


@triton.jit
def record_kernel(rows_ptr, tokens_ptr):
    """Program r: count the token of row r, unless it is negative; rows may share their counts."""
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * NUM_COLUMNS
    seen_ptr = tl.load(rows_ptr + SEEN)
    token = tl.load(tokens_ptr + row)
    if (seen_ptr != 0) & (token >= 0):
        counts_ptr = tl.load(rows_ptr + COUNTS).to(tl.pointer_type(tl.int32)) + token
        tl.atomic_add(counts_ptr, 1)
        tl.store(seen_ptr.to(tl.pointer_type(tl.int8)) + token, 1)


def process_(
    logits_RV: Tensor, rows_RA: Tensor, positions_R: Tensor, mask_RW: Tensor | None = None
) -> None:
    """Penalties, mask, biases, then suppressed tokens, in place. ``logits_RV`` float32;
    ``rows_RA`` int64, columns as in COLUMNS; ``positions_R`` int32, those of the tokens to draw.
    """
    rows, vocab = logits_RV.shape
    launch(
        penalty_kernel, (rows, cdiv(vocab, _BLOCK)),
        (logits_RV, rows_RA, rows_RA if mask_RW is None else mask_RW),
        (vocab, logits_RV.stride(0), 0 if mask_RW is None else mask_RW.stride(0)),
        MASK=mask_RW is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    launch(
        list_kernel, (rows,),
        (logits_RV, rows_RA, positions_R), (vocab, logits_RV.stride(0)),
        BLOCK=2 * _BLOCK, LIST=_LIST, num_warps=8,
    )  # fmt: skip


def record(rows_RA: Tensor, tokens_R: Tensor) -> None:
    """Count the tokens (int64 [R], negative for none) of rows that have counts."""
    launch(record_kernel, (tokens_R.shape[0],), (rows_RA, tokens_R), (), num_warps=1)
