"""Logits -> tokens on the device, without a sort and without waiting for the host.

A row's vocabulary is split into chunks of fixed size, so that one row keeps the whole GPU busy and
its result is the same in any batch. The first kernel writes, for each chunk, the highest logit, the
sum for the softmax and the highest score (scaled logit plus Gumbel noise); the second combines them
to the row's token. It applies top_k, top_p and min_p: a token is kept if fewer than top_k tokens
are more likely, these have at most mass top_p together, and its probability is at least min_p of
the highest. If the token of the highest score is filtered out, so are all that are no more likely;
the next candidate is the highest score of the rest. A round reads only chunks that hold such
tokens, and on average halves what is left. The token is exactly that of filtering first
(sampling/sampler.py).

Legend: R rows, V vocabulary, C chunks, W mask words (32 tokens each), P parameters of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import runs_on

_CHUNK = 2048
_WARPS = 4
_PICK_WARPS = 8
MAX_CHUNKS = 256
_FEW_CHUNKS = 64  # most vocabularies, up to 131072
# rows of the parameter table: floats as their bits, the seed as two halves
PARAMS = ("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "is_greedy")

CHUNK = tl.constexpr(_CHUNK)
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOP_K, SEED_LOW, SEED_HIGH = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
IS_GREEDY = tl.constexpr(6)
# what the first kernel leaves of a chunk
HIGHEST, SUM, SCORE, IS_BAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_NUM_FLOATS = 4
NUM_FLOATS = tl.constexpr(_NUM_FLOATS)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_LOW_A = tl.constexpr(0x7FEB352D)
_LOW_B = tl.constexpr(0x846CA68B)


@triton.jit
def _splitmix64(x):
    x += tl.full((1,), _GOLDEN, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((1,), _MIX_A, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((1,), _MIX_B, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full((1,), _LOW_A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((1,), _LOW_B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def draw_key(low, high, position):
    """The key of a draw, uint64 [1]: see sampling/noise.py. low, high: halves of the seed."""
    one = tl.zeros((1,), tl.uint64)
    seed = ((one + high.to(tl.uint32, bitcast=True)) << 32) | low.to(tl.uint32, bitcast=True)
    spread = (one + position.to(tl.uint64)) * tl.full((1,), _GOLDEN, tl.uint64)
    return _splitmix64(_splitmix64(seed) ^ spread)


@triton.jit
def gumbel_noise(key, token):
    """Standard Gumbel noise of token ids (int32), as in sampling/noise.py."""
    bits = _mix32(token.to(tl.uint32) ^ key.to(tl.uint32))
    bits = _mix32(bits + (key >> 32).to(tl.uint32)) & 0x7FFFFFFF
    v = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    left = 1.0 - v  # -log1p(-v) in single precision, to the last digits also for small v
    close = tl.where(left == 1.0, v, tl.log(left) * (v / (left - 1.0)))
    return -tl.log(close)


@triton.jit
def _parameter(params_ptr, stride, row, WHICH: tl.constexpr):
    return tl.load(params_ptr + WHICH * stride + row)


@triton.jit
def _number(params_ptr, stride, row, WHICH: tl.constexpr):
    return tl.load(params_ptr + WHICH * stride + row).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(params_ptr, stride, positions_ptr, row):
    low = _parameter(params_ptr, stride, row, SEED_LOW)
    high = _parameter(params_ptr, stride, row, SEED_HIGH)
    return draw_key(low, high, tl.load(positions_ptr + row))


# views of one table of numbers, whose places and rows change: neither may mean another compilation
@triton.jit(
    do_not_specialize=["params_stride", "mask_stride"],
    do_not_specialize_on_alignment=["params_ptr", "positions_ptr", "mask_ptr"],
)
def chunk_kernel(
    logits_ptr, params_ptr, positions_ptr, mask_ptr, floats_ptr, tokens_ptr,
    vocab, logits_stride, params_stride, mask_stride, num_chunks, MASK: tl.constexpr,
):  # fmt: skip
    """Program (r, c): chunk c of row r. floats [R, NUM_FLOATS, C] and tokens [R, 2, C] take what
    the second kernel needs; with MASK, forbidden logits become -inf in place."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    at = logits_ptr + row.to(tl.int64) * logits_stride + token
    x = tl.load(at, mask=inside, other=float("-inf"))
    if MASK:
        word = tl.load(
            mask_ptr + row.to(tl.int64) * mask_stride + token // 32, mask=inside, other=0
        )
        is_out = ((word >> (token % 32)) & 1) == 0
        x = tl.where(is_out, float("-inf"), x)
        tl.store(at, x, mask=inside & is_out)
    bad = tl.max(tl.where(x == x, 0.0, 1.0), 0)
    x = tl.where(x == x, x, float("-inf"))
    x /= _number(params_ptr, params_stride, row, TEMPERATURE)
    highest, first = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    floats_ptr += row.to(tl.int64) * NUM_FLOATS * num_chunks + chunk
    tokens_ptr += row.to(tl.int64) * 2 * num_chunks + chunk
    tl.store(floats_ptr + HIGHEST * num_chunks, highest)
    tl.store(floats_ptr + IS_BAD * num_chunks, bad)
    tl.store(tokens_ptr, chunk * CHUNK + first)
    if _parameter(params_ptr, params_stride, row, IS_GREEDY) == 0:
        base = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(floats_ptr + SUM * num_chunks, tl.sum(tl.exp(x - base), 0))
        score = x + gumbel_noise(_key_of(params_ptr, params_stride, positions_ptr, row), token)
        best, winner = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(floats_ptr + SCORE * num_chunks, best)
        tl.store(tokens_ptr + num_chunks, chunk * CHUNK + winner)


@triton.jit
def _more_likely(logits_ptr, floats_ptr, key, pivot, highest, temperature, vocab, num_chunks):
    """Of the tokens whose weight exp(scaled - highest) is above ``pivot``: their number, their
    weight, and the one with the best score (vocab where there are none)."""
    count_L = tl.zeros((CHUNK,), tl.int32)
    weight_L = tl.zeros((CHUNK,), tl.float32)
    best_L = tl.full((CHUNK,), float("-inf"), tl.float32)
    winner_L = tl.zeros((CHUNK,), tl.int32) + vocab
    for chunk in range(num_chunks):
        chunk_max = tl.load(floats_ptr + HIGHEST * num_chunks + chunk)
        if tl.exp(chunk_max - highest) > pivot:
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")) / temperature
            own = tl.exp(x - highest)
            above = own > pivot
            score = tl.where(above, x + gumbel_noise(key, token), float("-inf"))
            count_L += above.to(tl.int32)
            weight_L += tl.where(above, own, 0.0)
            winner_L = tl.where(score > best_L, token, winner_L)  # an earlier one has a lower id
            best_L = tl.maximum(best_L, score)
    count, weight = tl.sum(count_L, 0), tl.sum(weight_L.to(tl.float64), 0)
    best = tl.max(best_L, 0)
    return count, weight, tl.min(tl.where(best_L == best, winner_L, vocab), 0)


@triton.jit(
    do_not_specialize=["params_stride"],
    do_not_specialize_on_alignment=["params_ptr", "positions_ptr", "slots_ptr"],
)
def pick_kernel(
    logits_ptr, params_ptr, positions_ptr, floats_ptr, tokens_ptr,
    out_ptr, bad_ptr, next_ptr, slots_ptr,
    vocab, logits_stride, params_stride, num_chunks,
    TO_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: the token of row r, to ``out[r]`` and with TO_SLOTS to ``next[slots[r]]``."""
    row = tl.program_id(0)
    floats_ptr += row.to(tl.int64) * NUM_FLOATS * num_chunks
    tokens_ptr += row.to(tl.int64) * 2 * num_chunks
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    highest_C = tl.load(floats_ptr + HIGHEST * num_chunks + chunk, mask=inside, other=float("-inf"))
    is_bad = tl.max(tl.load(floats_ptr + IS_BAD * num_chunks + chunk, mask=inside, other=0.0), 0)
    highest, first = tl.max(highest_C, 0, return_indices=True, return_indices_tie_break_left=True)
    is_bad = tl.where(highest == float("-inf"), 1.0, is_bad)
    token = tl.load(tokens_ptr + first)
    if (_parameter(params_ptr, params_stride, row, IS_GREEDY) == 0) & (is_bad == 0.0):
        score_C = tl.load(floats_ptr + SCORE * num_chunks + chunk, mask=inside, other=float("-inf"))
        _, at = tl.max(score_C, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(tokens_ptr + num_chunks + at)
        top_k = _parameter(params_ptr, params_stride, row, TOP_K)
        top_p = _number(params_ptr, params_stride, row, TOP_P)
        min_p = _number(params_ptr, params_stride, row, MIN_P)
        if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
            sum_C = tl.load(floats_ptr + SUM * num_chunks + chunk, mask=inside, other=0.0)
            total = tl.sum(sum_C * tl.exp(highest_C - highest), 0)
            most_weight = tl.where(top_p < 1.0, (total * top_p).to(tl.float64), float("inf"))
            temperature = _number(params_ptr, params_stride, row, TEMPERATURE)
            key = _key_of(params_ptr, params_stride, positions_ptr, row)
            logits_ptr += row.to(tl.int64) * logits_stride
            is_out = True
            while is_out:
                own = tl.exp(tl.load(logits_ptr + token) / temperature - highest)
                count, weight, winner = _more_likely(
                    logits_ptr, floats_ptr, key, own, highest, temperature, vocab, num_chunks
                )
                is_out = (count >= top_k) | (weight > most_weight) | (own < min_p)
                is_out = is_out & (count > 0) & (winner != token)  # the latter is for safety
                token = tl.where(is_out, winner, token)
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(bad_ptr + row, is_bad != 0.0)
    if TO_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        tl.store(next_ptr + slot, token.to(next_ptr.dtype.element_ty))


def takes(logits_RV: Tensor) -> bool:
    """Whether ``draw`` can work on these logits."""
    return (
        runs_on(logits_RV)
        and logits_RV.dtype == torch.float32
        and logits_RV.stride(1) == 1
        and logits_RV.shape[1] <= MAX_CHUNKS * _CHUNK
    )


def draw(
    logits_RV: Tensor,
    params_PR: Tensor,
    positions_R: Tensor,
    mask_RW: Tensor | None = None,
    next_token: Tensor | None = None,
    slots_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R], and bool [R]: whether the row has a NaN or allows nothing (its token then
    means nothing). All on the device; no wait, so a graph may hold it.

    ``logits_RV`` float32, changed in place by ``mask_RW`` (int32, bit i of word w allows token
    32 w + i). ``params_PR`` int32, rows as in PARAMS, at least R columns; ``positions_R`` int32.
    The token goes to ``next_token[slots_R]`` too, if given.
    """
    rows, vocab = logits_RV.shape
    chunks = cdiv(vocab, _CHUNK)
    device = logits_RV.device
    floats = torch.empty(rows, _NUM_FLOATS, chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, 2, chunks, dtype=torch.int32, device=device)
    out_R = torch.empty(rows, dtype=torch.int64, device=device)
    bad_R = torch.empty(rows, dtype=torch.bool, device=device)
    stride = params_PR.stride(0)
    launch(
        chunk_kernel, (rows, chunks),
        (logits_RV, params_PR, positions_R, params_PR if mask_RW is None else mask_RW,
         floats, tokens),
        (vocab, logits_RV.stride(0), stride, 0 if mask_RW is None else mask_RW.stride(0), chunks),
        MASK=mask_RW is not None, num_warps=_WARPS,
    )  # fmt: skip
    launch(
        pick_kernel, (rows,),
        (logits_RV, params_PR, positions_R, floats, tokens, out_R, bad_R,
         out_R if next_token is None else next_token, out_R if slots_R is None else slots_R),
        (vocab, logits_RV.stride(0), stride, chunks),
        TO_SLOTS=next_token is not None, BLOCK=_FEW_CHUNKS if chunks <= _FEW_CHUNKS else MAX_CHUNKS,
        num_warps=_PICK_WARPS,
    )  # fmt: skip
    return out_R, bad_R


def pack_params(floats_R3: Tensor, top_k_R: Tensor, seeds_R: Tensor, is_greedy_R: Tensor) -> Tensor:
    """The parameter table of rows: float32 [R, 3] (temperature, top_p, min_p), int64 [R] each."""
    seeds = seeds_R.contiguous().view(torch.int32).view(-1, 2).T
    floats = floats_R3.contiguous().view(torch.int32).T
    return torch.cat((floats, top_k_R.int()[None], seeds, is_greedy_R.int()[None])).contiguous()
