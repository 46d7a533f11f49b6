"""What attention to sums of tokens costs."""

from __future__ import annotations

from radixlm.arch.spec import SummedAttention


def summed_parameters(mixer: SummedAttention, dim: int) -> tuple[int, int]:
    """Parameters of (matrices, everything else) in a model of width ``dim``."""
    width, sums = mixer.heads * mixer.head_dim, mixer.sums
    matrices = dim * (mixer.q_rank + mixer.head_dim + mixer.groups * mixer.group_rank)
    matrices += width * (mixer.q_rank + mixer.group_rank)
    vectors = mixer.q_rank + mixer.head_dim + mixer.heads
    if sums is not None:
        raw = sums.raw(mixer.head_dim) + sums.raw(sums.dim)
        matrices += dim * (raw + sums.heads) + mixer.q_rank * sums.heads * sums.dim
        vectors += sums.rate * raw // 2 + mixer.head_dim + sums.dim
    return matrices, vectors


def summed_flops(mixer: SummedAttention, context: int) -> int:
    """Multiply-adds times two of scores and weighted sums over ``context`` tokens."""
    seen, sums = min(context, mixer.own_window), mixer.sums
    flops = 0
    if sums is not None:
        entries = context // sums.rate
        flops = 2 * entries * sums.heads * sums.dim
        seen += min(entries, sums.top_k) if sums.heads else entries
    return flops + 4 * seen * mixer.heads * mixer.head_dim
