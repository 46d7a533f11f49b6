"""Double sparsity on a GPU (arXiv:2408.07092): approximate scores of all tokens by the labels of
their keys, and the tokens with the best. Labels are rows of an int8 cache of W channels.

Scores are exact sums of whole numbers, so that the tokens are those that
``attention/double_sparsity.py: chosen_tokens`` chooses.

Legend: R rows (output tokens), S sequences, H query heads, K KV heads, G query heads of a KV head,
W heavy channels, N tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2
from radixlm.kernels.triton.mode import operand

_TOKENS = 128  # of a program that scores
_SELECTED = 1024  # tokens that a selecting program looks at together
_LABEL_MOST: tl.constexpr = tl.constexpr(16383.0)  # see attention/double_sparsity.py


@triton.jit
def _products(labels_GW, keys_WN):
    """Sums of products of whole numbers of 8 bits, int32 in a GPU, float32 in the interpreter."""
    return tl.dot(operand(labels_GW), operand(keys_WN))


@triton.jit(do_not_specialize=["q_stride", "q_head_stride", "table_stride", "keys_stride"],
            do_not_specialize_on_alignment=["seen", "sequences", "page_table"])  # fmt: skip
def score_kernel(
    q, channels, labels, scales, page_table, sequences, seen, keys,
    q_stride, q_head_stride, table_stride, keys_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (r, k, i): TOKENS tokens of row r for KV head k, the best score of its query heads,
    written as the whole number of its float32's bits, larger for better ones, unsigned."""
    row, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TOKENS
    length = tl.load(seen + row)
    if first >= length:
        return
    g, w = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_W)
    is_label = (g < GROUP)[:, None] & (w < WIDTH)[None, :]
    channel = tl.load(channels + head * WIDTH + w, mask=w < WIDTH, other=0)
    at = q + row.to(tl.int64) * q_stride + (head * GROUP + g)[:, None] * q_head_stride
    query = tl.load(at + channel[None, :], mask=is_label, other=0.0).to(tl.float32)
    step = tl.max(tl.abs(query), 1) / _LABEL_MOST
    part = tl.where(step[:, None] > 0, query / tl.where(step > 0, step, 1.0)[:, None], 0.0)
    magic = 12582912.0  # 1.5 * 2^23: rounds to nearest even
    label = ((part + magic) - magic).to(tl.int32)
    n = first + tl.arange(0, TOKENS)
    pages = page_table + tl.load(sequences + row).to(tl.int64) * table_stride
    page = tl.load(pages + n // PAGE, mask=n < length, other=0).to(tl.int64)
    key_row = (page * PAGE + n % PAGE) * KV_HEADS + head
    is_key = (w < WIDTH)[:, None] & (n < length)[None, :]
    key = tl.load(labels + key_row[None, :] * WIDTH + w[:, None], mask=is_key, other=0)
    high = _products((label >> 7).to(tl.int8), key).to(tl.int32)
    low = _products((label & 127).to(tl.int8), key).to(tl.int32)
    scale = tl.load(scales + key_row, mask=n < length, other=0.0)
    best = tl.max(tl.where((g < GROUP)[:, None], high * 128 + low, -2147483648), 0)
    score = best.to(tl.float32) * scale + 0.0  # no negative zeros
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    out = keys + (row * KV_HEADS + head).to(tl.int64) * keys_stride
    tl.store(out + n, order, mask=n < length)


@triton.jit
def _digits(keys, begin, length, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Some keys without their last SHIFT bits, and which of them are there."""
    at = begin + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < length, other=0).to(tl.uint32, bitcast=True)
    return (key >> SHIFT).to(tl.int64), at < length


@triton.jit(do_not_specialize=["table_stride", "keys_stride", "first_row", "top"],
            do_not_specialize_on_alignment=["seen", "sequences", "page_table"])  # fmt: skip
def select_kernel(
    keys, page_table, sequences, seen, chosen, table_stride, keys_stride, first_row, top,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, k): the ``top`` best tokens of a head in order, of equal ones the earlier, as
    rows of a cache [slots * K, ...]. The key of the last one is found byte by byte, the highest
    first."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seen + row)
    keys += (row * KV_HEADS + head).to(tl.int64) * keys_stride
    wanted = tl.minimum(top, length)
    least = tl.zeros([], tl.int64)  # bytes of the last key, as far as they are known
    byte = tl.arange(0, 256)
    for place in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, length, BLOCK):
            digits, inside = _digits(keys, begin, length, 24 - 8 * place, BLOCK)
            own = inside & (digits >> 8 == least)
            counts += tl.histogram((digits & 255).to(tl.int32), 256, mask=own)
        from_here = tl.sum(counts) - tl.cumsum(counts, 0) + counts  # with this byte or a larger one
        last = tl.max(tl.where(from_here >= wanted, byte, 0))
        wanted -= tl.sum(tl.where(byte > last, counts, 0))
        least = least * 256 + last
    pages = page_table + tl.load(sequences + row).to(tl.int64) * table_stride
    chosen += ((first_row + row) * KV_HEADS + head).to(tl.int64) * top
    done, equals = 0, 0
    for begin in range(0, length, BLOCK):
        key, inside = _digits(keys, begin, length, 0, BLOCK)
        is_equal = (inside & (key == least)).to(tl.int32)
        number = equals + tl.cumsum(is_equal, 0) - is_equal
        takes = (inside & ((key > least) | ((is_equal != 0) & (number < wanted)))).to(tl.int32)
        n = begin + tl.arange(0, BLOCK)
        page = tl.load(pages + n // PAGE, mask=takes != 0, other=0).to(tl.int64)
        cache_row = (page * PAGE + n % PAGE) * KV_HEADS + head
        at = done + tl.cumsum(takes, 0) - takes
        tl.store(chosen + at, cache_row.to(tl.int32), mask=takes != 0)
        done += tl.sum(takes)
        equals += tl.sum(is_equal)


def choose(
    q_RHC: Tensor,
    channels_KW: Tensor,
    labels: tuple[Tensor, Tensor],
    page_table_SP: Tensor,
    rows: tuple[Tensor, Tensor],
    page_size: int,
    keys: Tensor,
    chosen_NT: Tensor,
) -> None:
    """Fill ``chosen_NT`` (int32 [R * K, T]) with rows of the cache. ``labels``: int8 [slots, K, W]
    and their scales; ``rows``: int32 [R] each, the sequence and how many tokens it sees, 0: nothing
    is chosen; ``keys``: int32 memory, for some rows at once."""
    (num_rows, heads, _), (kv_heads, width) = q_RHC.shape, channels_KW.shape
    max_len = page_table_SP.shape[1] * page_size
    wave = max(1, keys.numel() // (kv_heads * max_len))
    group, sizes = heads // kv_heads, {"KV_HEADS": kv_heads, "PAGE": page_size}
    for first in range(0, num_rows, wave):
        sequences, seen = (x[first : first + wave] for x in rows)
        count = len(seen)
        launch(
            score_kernel, (count, kv_heads, cdiv(max_len, _TOKENS)),
            (q_RHC[first:], channels_KW, *labels, page_table_SP, sequences, seen, keys),
            (q_RHC.stride(0), q_RHC.stride(1), page_table_SP.stride(0), max_len),
            GROUP=group, WIDTH=width, TOKENS=_TOKENS, **_blocks(group, width), **sizes,
            num_warps=4,
        )  # fmt: skip
        launch(
            select_kernel, (count, kv_heads),
            (keys, page_table_SP, sequences, seen, chosen_NT),
            (page_table_SP.stride(0), max_len, first, chosen_NT.shape[1]),
            BLOCK=_SELECTED, **sizes, num_warps=8,
        )  # fmt: skip


def _blocks(group: int, width: int) -> dict[str, int]:
    """The sizes of a product on tensor cores."""
    return {
        "BLOCK_G": max(16, next_power_of_2(group)),
        "BLOCK_W": max(32, next_power_of_2(width)),
    }
