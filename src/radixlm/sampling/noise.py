"""Random numbers that depend only on (seed, position, token id).

A draw is the argmax of logits plus Gumbel noise. The noise of a token comes from a counter-based
generator, so a request gets the same tokens alone, in any batch, and after a restart; two steps
never share noise because their positions differ. Integers only wrap around and every float is
computed element by element, so no sum depends on the shape of a batch.

The generator: splitmix64 (Steele, Lea, Flood 2014) turns (seed, position) into a 64-bit key; two
rounds of a 32-bit finaliser with low bias (Wellons 2018, "lowbias32"), half of the key before
each, turn a token id into 32 random bits.
"""

import torch
from torch import Tensor


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_B = _signed(0x94D049BB133111EB, 64)
_LOW_A = 0x7FEB352D
_LOW_B = _signed(0x846CA68B, 32)


def _splitmix64(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def draw_keys(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """int64 seeds and positions of the tokens to draw -> int64 keys [R]."""
    return _splitmix64(_splitmix64(seeds_R) ^ (positions_R * _GOLDEN))


def _mix32_(x: Tensor) -> Tensor:
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_LOW_A)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_LOW_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def random_bits(keys_R: Tensor, tokens_RK: Tensor) -> Tensor:
    """31 random bits, int32 [R, K], for each token id (int32 [R, K] or [1, K])."""
    low_R = _wrap32(keys_R)
    high_R = _wrap32(keys_R >> 32)
    bits = _mix32_(tokens_RK ^ low_R[:, None])
    return _mix32_(bits.add_(high_R[:, None])).bitwise_and_(0x7FFFFFFF)


def _wrap32(x: Tensor) -> Tensor:
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def gumbel_noise(keys_R: Tensor, tokens_RK: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, K]."""
    v = random_bits(keys_R, tokens_RK).to(torch.float32)
    # v in (0, 1) with the fine steps near 0, where the winners of an argmax are
    v.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
