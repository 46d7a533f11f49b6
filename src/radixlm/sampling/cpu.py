"""The draw of one row on a CPU: the filters of ``sampler`` and the noise of ``noise``, in numpy.

A torch operation on a few thousand numbers costs more to call than to compute; numpy costs a
fraction of that, sorts floats many times faster, and has unsigned integers. Every step works on one
row.
"""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
MAX_NOISE = 22.3  # -log(-log1p(-2**-32)), rounded up


def draw_keys(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """``noise.draw_keys`` as unsigned integers."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    spread = np.array(positions, dtype=np.int64).view(np.uint64) * golden
    return _splitmix64(_splitmix64(np.array(seeds, dtype=np.int64).view(np.uint64)) ^ spread)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def random_bits(key: int, tokens_K: Words) -> Words:
    """``noise.random_bits`` of one row."""
    x = tokens_K ^ np.uint32(key & 0xFFFFFFFF)
    _mix32_(x)
    x += np.uint32(key >> 32)
    _mix32_(x)
    x &= np.uint32(0x7FFFFFFF)
    return x


def _mix32_(x: Words) -> None:
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)


def gumbel_noise(key: int, tokens_K: Words) -> npt.NDArray[np.float64]:
    """``noise.gumbel_noise`` of one row, in double: 1 - v is exact there."""
    v = random_bits(key, tokens_K).astype(np.float64)
    v += 0.5
    v *= -(2.0**-31)
    v += 1.0
    np.log(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    return np.negative(v, out=v)


# a byte of a mask -> the upper bounds of eight logits
_BOUNDS_256_8 = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32("inf"),
    np.float32("-inf"),
)
_SMALL_VOCAB = 8192  # larger ones are masked row by row, so that the bounds stay in the CPU cache


def apply_mask_(logits_RV: Floats, mask_RW: npt.NDArray[np.int32]) -> None:
    """``sampler.apply_mask_``: a lookup and a minimum, no branch for each bit."""
    num_rows, vocab_size = logits_RV.shape
    bytes_RB = np.ascontiguousarray(mask_RW).view(np.uint8)
    step = num_rows if vocab_size <= _SMALL_VOCAB else 1
    for row in range(0, num_rows, step or 1):
        part = slice(row, row + step)
        bounds = _BOUNDS_256_8.take(bytes_RB[part], axis=0)
        bounds = bounds.reshape(len(bounds), -1)[:, :vocab_size]
        np.minimum(logits_RV[part], bounds, out=logits_RV[part])


def draw(
    logits_V: Floats, key: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """One token. ``top_k`` is at least 1; the vocabulary's size means no limit."""
    with np.errstate(invalid="ignore", over="ignore"):  # rows of NaN or of -inf alone
        scaled_V = logits_V / np.float32(temperature)
        if top_k < len(scaled_V) or top_p < 1.0:
            kept = _filter(scaled_V, top_k, top_p, min_p)
        else:
            kept = _possible_winners(scaled_V, key, min_p)
    if len(kept) == 0:  # NaN
        return 0
    scores = gumbel_noise(key, kept.astype(np.uint32))
    scores += scaled_V[kept]
    return int(kept[scores.argmax()])


def _possible_winners(scaled_V: Floats, key: int, min_p: float) -> npt.NDArray[np.intp]:
    """Tokens that can win the draw: logits further below the score of the most likely token than
    any noise is large cannot."""
    best = int(scaled_V.argmax())
    highest = float(scaled_V[best])
    lowest = highest + float(gumbel_noise(key, np.array([best], dtype=np.uint32))[0]) - MAX_NOISE
    if min_p > 0.0:
        lowest = max(lowest, highest + math.log(min_p))
    return np.flatnonzero(scaled_V >= np.float32(lowest))


def _filter(scaled_V: Floats, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.intp]:
    """Tokens that top_k, top_p and min_p keep, sorting as little as possible."""
    probs_V = np.exp(scaled_V - scaled_V.max())
    probs_V /= probs_V.sum()
    num = len(probs_V)
    if top_k < num:
        top = np.partition(probs_V, num - top_k)[num - top_k :]
    else:  # all tokens below this have less mass together than top_p drops
        top = probs_V[probs_V >= (1.0 - top_p) / (2 * num)]
    if len(top) == 0:  # NaN
        return np.flatnonzero(top)
    top = np.sort(top)[::-1]
    num_kept = len(top)
    if top_p < 1.0:
        wide = top.astype(np.float64)  # sums of many small numbers
        num_kept = max(1, int(np.count_nonzero(wide.cumsum() - wide <= top_p)))
    lowest = max(top[num_kept - 1], top[0] * np.float32(min_p))
    return np.flatnonzero(probs_V >= lowest)
