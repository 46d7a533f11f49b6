"""Attention over a paged KV cache, for decode and prefill: K and V of all tokens, the step's own
included, are read from their pages.

A program takes one unit of the plan (attention_plan.py): a block of query tokens of one sequence,
with all query heads that share a KV head as rows of one tile, and a part of the tokens that they
attend to (a split). If a block has one split the program writes the result, else a partial result,
which ``combine_kernel`` combines.

Rows of a tile: token-major, GROUP heads of the KV head a token (in several programs where there
are more heads than rows). Softmax runs in base 2. Latent caches (MLA) have one KV head whose first
V_DIM channels are also V: loaded once.

Legend: T packed tokens, S sequences, M rows of a tile, N keys of a tile, C channels of K, V of V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixlm.kernels.triton.mode import if_set, operand

# The step's numbers are views of one buffer, and its sizes change: neither may mean another
# compilation while requests wait.
_VIEWS = ["query_start", "kv_len", "page_table", "unit_row", "unit_number", "splits", "split_len",
          "num_units", "tree", "positions"]  # fmt: skip
_SIZES = ["table_stride", "tree_stride", "window", "chunk", "scale", "softcap", "has_sinks",
          "has_slopes", "has_tree"]  # fmt: skip
_UNBOUNDED: tl.constexpr = tl.constexpr(1 << 30)  # of windows and chunks: none

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
E4M3_BITS: tl.constexpr = tl.constexpr(2)  # KIND of a cache of fp8 e4m3 in bytes, for sm_80
SCALED: tl.constexpr = tl.constexpr(1)  # int8 with a scale for each token and head
INT4: tl.constexpr = tl.constexpr(3)  # bytes of two numbers with a scale for 32 channels


@triton.jit
def _dequantize(x, dtype: tl.constexpr, KIND: tl.constexpr):
    """Numbers of the cache in the dtype of q."""
    if KIND == E4M3_BITS:  # sign, 4 bits of exponent (bias 7), 3 of mantissa, as a half / 2^8
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(dtype)
    return x.to(dtype)


@triton.jit
def _load_rows(
    base, scales, slot, inside, dtype: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Channels [FIRST, FIRST + BLOCK) of some slots: [N, BLOCK]; zeros outside."""
    channel = FIRST + tl.arange(0, BLOCK)
    if KIND == INT4:
        GROUPS: tl.constexpr = (DIM + 31) // 32
        row = slot[:, None] * (KV_HEADS * GROUPS) + (channel // 32)[None, :]
        mask = inside[:, None] & (channel < DIM)[None, :]
        both = tl.load(base + row * 16 + (channel % 16)[None, :], mask=mask, other=0)
        number = ((both.to(tl.int32) >> (channel // 16 % 2 * 4)[None, :]) & 15) - 8
        scale = tl.load(scales + row, mask=mask, other=0.0).to(tl.float32)
        return (number.to(tl.float32) * scale).to(dtype)
    at = base + slot[:, None] * (KV_HEADS * DIM) + channel[None, :]
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
    elif FIRST + BLOCK > DIM:
        x = tl.load(at, mask=(channel < DIM)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return _dequantize(x, dtype, KIND)


@triton.jit
def _visible(
    key_pos, position, lowest, stop, chunk, tree, tree_stride, positions, first, prefix, token,
    live, has_tree, EXTRA: tl.constexpr,
):  # fmt: skip
    """The mask of keys that rows attend to, and key minus query position: [M, N]."""
    key = key_pos
    if EXTRA:
        step = key_pos - prefix  # of the step's own tokens, from 0
        is_new = if_set(has_tree, (step >= 0) & (key_pos < stop))
        key = tl.where(is_new, tl.load(positions + first + step, mask=is_new, other=0), key_pos)
        key = key.to(tl.int32)
    ahead = key[None, :] - position[:, None]
    seen = (key_pos < stop)[None, :] & (key[None, :] >= lowest[:, None])
    if EXTRA:
        at = tree + (first + token).to(tl.int64)[:, None] * tree_stride + (step >> 5)[None, :]
        word = tl.load(at, mask=live[:, None] & is_new[None, :], other=0)
        in_tree = ((word >> (step & 31)[None, :]) & 1 != 0) | (step < 0)[None, :]
        seen = seen & tl.where(has_tree != 0, in_tree, ahead <= 0)
        seen = seen & (key[None, :] // chunk == position[:, None] // chunk)
    else:
        seen = seen & (ahead <= 0)
    return seen, ahead


@triton.jit
def _page(pages, key_pos, stop, PAGE: tl.constexpr):
    """Pages of some positions, 0 from ``stop`` on: table entries there may be stale."""
    return tl.load(pages + key_pos // PAGE, mask=key_pos < stop, other=0)


@triton.jit
def _attend_tiles(
    q1, q2, acc, m_i, l_i, start, stop, k, v, k_scale, v_scale, pages,
    scale, softcap, slope, chunk, tree, tree_stride, positions, first, prefix, token,
    position, lowest, live, has_tree,
    KIND: tl.constexpr, MASKED: tl.constexpr, EXTRA: tl.constexpr, LATENT: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to [start, stop) in tiles of KEYS keys by the online softmax of FlashAttention:
    ``m_i`` is the running maximum of a row, ``l_i`` its sum, ``alpha`` rescales what was summed
    before."""
    dtype: tl.constexpr = q1.dtype
    lane_n = tl.arange(0, KEYS)
    cap = tl.where(softcap > 0.0, softcap, 1.0)
    page = _page(pages, start + lane_n, stop, PAGE)
    for at in range(start, stop, KEYS):
        key_pos = at + lane_n
        inside = key_pos < stop
        slot = page.to(tl.int64) * PAGE + key_pos % PAGE
        page = _page(pages, key_pos + KEYS, stop, PAGE)  # of the next tile
        k1 = _load_rows(k, k_scale, slot, inside, dtype, KIND, MASKED, KV_HEADS, 0, BLOCK_C, DIM)
        qk = tl.dot(operand(q1), operand(tl.trans(k1)), input_precision="ieee")
        if BLOCK_R > 0:
            k2 = _load_rows(
                k, k_scale, slot, inside, dtype, KIND, MASKED, KV_HEADS, BLOCK_C, BLOCK_R, DIM
            )
            qk = tl.dot(operand(q2), operand(tl.trans(k2)), qk, input_precision="ieee")
        if KIND == SCALED:
            k_row = tl.load(k_scale + slot * KV_HEADS, mask=inside, other=0.0)
            qk = qk * k_row[None, :]
        if EXTRA:  # tanh(x) = 2 sigmoid(2 x) - 1
            capped = cap * (2.0 * tl.sigmoid(qk * (2.0 * scale / cap)) - 1.0)
            qk = tl.where(softcap > 0.0, capped, qk * scale) * _LOG2E
        else:
            qk = qk * (scale * _LOG2E)
        if MASKED or EXTRA:
            seen, ahead = _visible(
                key_pos, position, lowest, stop, chunk, tree, tree_stride, positions, first,
                prefix, token, live, has_tree, EXTRA,
            )  # fmt: skip
            if EXTRA:
                qk = qk + slope[:, None] * ahead
            if MASKED:
                qk = tl.where(seen, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        weight = tl.exp2(qk - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)
        l_i = l_i * alpha + tl.sum(weight, 1)
        m_i = m_new
        if KIND == SCALED:
            if LATENT:
                weight = weight * k_row[None, :]
            else:
                v_row = tl.load(v_scale + slot * KV_HEADS, mask=inside, other=0.0)
                weight = weight * v_row[None, :]
        acc = acc * alpha[:, None]
        if LATENT:
            acc = tl.dot(operand(weight.to(dtype)), operand(k1), acc, input_precision="ieee")
        else:
            x = _load_rows(
                v, v_scale, slot, inside, dtype, KIND, MASKED, KV_HEADS, 0, BLOCK_V, V_DIM
            )
            acc = tl.dot(operand(weight.to(dtype)), operand(x), acc, input_precision="ieee")
    return acc, m_i, l_i


@triton.jit
def _key_range(
    low, high, prefix, length, split, part, window, chunk, has_tree,
    EXTRA: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[start, stop) of this split for tokens at positions low..high; before ``full`` every token
    attends to every key, so no mask is needed."""
    stop = high + 1
    full = low + 1
    if EXTRA:
        low = tl.where(has_tree != 0, prefix, low)
        stop = tl.where(has_tree != 0, length, stop)
        full = tl.where(has_tree != 0, prefix, full)
    start = tl.maximum(tl.maximum(low - window + 1, low // chunk * chunk), 0)
    start = start // KEYS * KEYS + split * part
    stop = tl.minimum(stop, start + part)
    is_local = tl.minimum(window, chunk) < _UNBOUNDED
    full = tl.minimum(tl.where(is_local, start, full), stop)
    full = start + tl.maximum(full - start, 0) // KEYS * KEYS
    return start, stop, full


@triton.jit
def _rows_of(
    unit_number, splits, query_start, row, unit, lane,
    GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """(split, splits, first query, queries, token block, kv head, head block). The last tokens,
    which read most, come first."""
    parts = tl.load(splits + row)
    number = tl.load(unit_number + unit)
    first = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - first
    block = (queries + TOKENS - 1) // TOKENS - 1 - number // parts
    return number % parts, parts, first, queries, block


@triton.jit
def _load_q(q_row, live, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Channels [FIRST, FIRST + BLOCK) of the rows' queries: [M, BLOCK]."""
    c = FIRST + tl.arange(0, BLOCK)
    return tl.load(q_row[:, None] + c[None, :], mask=live[:, None] & (c < DIM)[None, :], other=0.0)


@triton.jit
def _store_result(
    acc, m_i, l_i, out, partial, lse, o_row, p_row, parts, live,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the result if there is one split, else this split's part and its log-sum-exp."""
    safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row without keys gives zeros
    acc = acc / safe[:, None]
    e = tl.arange(0, BLOCK_V)
    mask = live[:, None] & (e < V_DIM)[None, :]
    if parts == 1:
        tl.store(out + o_row[:, None] * V_DIM + e, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + p_row[:, None] * V_DIM + e[None, :], acc, mask=mask)
        part_lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(safe))
        tl.store(lse + p_row, part_lse, mask=live)


@triton.jit
def _head_of(x, scales, head, KIND: tl.constexpr, DIM: tl.constexpr):
    """Where a head's rows and scales of slot 0 begin."""
    if KIND == INT4:
        GROUPS: tl.constexpr = (DIM + 31) // 32
        return x + head * (GROUPS * 16), scales + head * GROUPS
    return x + head * DIM, scales + head


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VIEWS)
def attention_kernel(
    q, k, v, out, partial, lse, k_scale, v_scale, sinks, slopes, tree, positions,
    query_start, kv_len, page_table, unit_row, unit_number, splits, split_len, num_units,
    q_stride, q_head_stride, table_stride, tree_stride, scale, softcap, window, chunk,
    has_sinks, has_slopes, has_tree,
    KIND: tl.constexpr, SPLIT_LOOP: tl.constexpr, EXTRA: tl.constexpr, LATENT: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One unit of work for one KV head; see the file's head. EXTRA: scores may be capped
    (``softcap`` > 0) or have slopes, and the step's own tokens may see a tree. ``window`` and
    ``chunk`` of 2^30: none."""
    unit = tl.program_id(0)
    lane = tl.program_id(1)
    if unit >= tl.load(num_units):
        return
    row = tl.load(unit_row + unit)
    split, parts, first, queries, block = _rows_of(
        unit_number, splits, query_start, row, unit, lane, GROUP, HEAD_BLOCKS, GROUP_BLOCK, TOKENS
    )
    length = tl.load(kv_len + row)
    prefix = length - queries
    kv_head = lane // HEAD_BLOCKS
    m = tl.arange(0, ROWS)
    token = block * TOKENS + m // GROUP_BLOCK
    group_head = (lane % HEAD_BLOCKS) * GROUP_BLOCK + m % GROUP_BLOCK
    head = kv_head * GROUP + group_head
    live = (m < TOKENS * GROUP_BLOCK) & (token < queries) & (group_head < GROUP)
    position = prefix + token
    if EXTRA:
        inside = if_set(has_tree, live)
        position = tl.load(positions + first + token, mask=inside, other=position).to(tl.int32)
    lowest = tl.maximum(position - window + 1, position // chunk * chunk)
    q_row = q + (first + token).to(tl.int64) * q_stride + head * q_head_stride
    q1 = _load_q(q_row, live, 0, BLOCK_C, DIM)
    q2 = q1
    if BLOCK_R > 0:
        q2 = _load_q(q_row, live, BLOCK_C, BLOCK_R, DIM)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if (split == 0) & (has_sinks != 0):
        m_i = tl.load(sinks + head, mask=live, other=0.0) * _LOG2E
        l_i = tl.full([ROWS], 1.0, tl.float32)
    slope = m_i
    if EXTRA:
        slope = tl.load(slopes + head, mask=if_set(has_slopes, live), other=0.0) * _LOG2E
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    low = prefix + block * TOKENS
    start, stop, full = _key_range(
        low, tl.minimum(low + TOKENS, length) - 1, prefix, length, split,
        tl.load(split_len + row), window, chunk, has_tree, EXTRA, KEYS,
    )  # fmt: skip
    pages = page_table + row.to(tl.int64) * table_stride
    k, k_scale = _head_of(k, k_scale, kv_head, KIND, DIM)
    v, v_scale = _head_of(v, v_scale, kv_head, KIND, DIM if LATENT else V_DIM)
    if SPLIT_LOOP:
        acc, m_i, l_i = _attend_tiles(
            q1, q2, acc, m_i, l_i, start, full, k, v, k_scale, v_scale,
            pages, scale, softcap, slope, chunk, tree, tree_stride, positions, first,
            prefix, token, position, lowest, live, has_tree, KIND, False, EXTRA, LATENT,
            KV_HEADS, PAGE, DIM, V_DIM, BLOCK_C, BLOCK_R, BLOCK_V, KEYS,
        )  # fmt: skip
        start = full
    acc, m_i, l_i = _attend_tiles(
        q1, q2, acc, m_i, l_i, start, stop, k, v, k_scale, v_scale,
        pages, scale, softcap, slope, chunk, tree, tree_stride, positions, first,
        prefix, token, position, lowest, live, has_tree, KIND, True, EXTRA, LATENT,
        KV_HEADS, PAGE, DIM, V_DIM, BLOCK_C, BLOCK_R, BLOCK_V, KEYS,
    )  # fmt: skip
    o_row = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    p_row = (unit.to(tl.int64) * (KV_HEADS * HEAD_BLOCKS) + lane) * (TOKENS * GROUP_BLOCK) + m
    _store_result(acc, m_i, l_i, out, partial, lse, o_row, p_row, parts, live, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def combine_kernel(
    out, partial, lse, query_start, unit_row, unit_number, splits, num_units,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Combine the splits of BLOCK_M rows of a block, BLOCK_P at a time, by the programs of its
    first unit. Grid: units, lanes, rows."""
    unit = tl.program_id(0)
    if unit >= tl.load(num_units):
        return
    row = tl.load(unit_row + unit)
    split, parts, first, queries, block = _rows_of(
        unit_number, splits, query_start, row, unit, 0, GROUP, HEAD_BLOCKS, GROUP_BLOCK, TOKENS
    )
    if (parts == 1) | (split != 0):
        return
    lane = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = block * TOKENS + m // GROUP_BLOCK
    group_head = (lane % HEAD_BLOCKS) * GROUP_BLOCK + m % GROUP_BLOCK
    live = (m < TOKENS * GROUP_BLOCK) & (token < queries) & (group_head < GROUP)
    e = tl.arange(0, BLOCK_V)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(0, parts, BLOCK_P):
        p = at + tl.arange(0, BLOCK_P)
        inside = live[:, None] & (p < parts)[None, :]
        p_row = (unit + p).to(tl.int64) * (KV_HEADS * HEAD_BLOCKS) + lane
        p_row = p_row[None, :] * (TOKENS * GROUP_BLOCK) + m[:, None]
        part_lse = tl.load(lse + p_row, mask=inside, other=float("-inf"))
        mask = inside[:, :, None] & (e < V_DIM)[None, None, :]
        x = tl.load(partial + p_row[:, :, None] * V_DIM + e[None, None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(part_lse, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(part_lse - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)
        acc = acc * alpha[:, None] + tl.sum(x * weight[:, :, None], 1)
        l_i = l_i * alpha + tl.sum(weight, 1)
        m_i = m_new
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    head = (lane // HEAD_BLOCKS) * GROUP + group_head
    o_row = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    mask = live[:, None] & (e < V_DIM)[None, :]
    tl.store(out + o_row[:, None] * V_DIM + e, acc.to(out.dtype.element_ty), mask=mask)
