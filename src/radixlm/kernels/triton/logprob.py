"""Log-probabilities of requested tokens, from logits. The vocabulary is split into chunks of fixed
size, so a row's result is the same in any batch.

Legend: R rows, V vocabulary, C chunks, K tokens of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2

_CHUNK = 4096
_FEW_CHUNKS = 64  # 262144 tokens
CHUNK = tl.constexpr(_CHUNK)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # JSON knows no -inf


@triton.jit
def sum_kernel(logits_ptr, sums_ptr, vocab, logits_stride, num_chunks):
    """Program (r, c): the highest logit of a chunk and the sum of exponentials below it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    at = logits_ptr + row * logits_stride + token
    x = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    highest = tl.max(x, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(sums_ptr + 2 * row * num_chunks + chunk, highest)
    tl.store(sums_ptr + (2 * row + 1) * num_chunks + chunk, tl.sum(tl.exp(x - base), 0))


@triton.jit(do_not_specialize=["num_tokens"])
def logprob_kernel(
    logits_ptr, sums_ptr, tokens_ptr, out_ptr, logits_stride, num_chunks, num_tokens,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program r: log-softmax of row r at its tokens."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    sums_ptr += 2 * row * num_chunks + chunk
    highest_C = tl.load(sums_ptr, mask=inside, other=float("-inf"))
    highest = tl.max(highest_C, 0)
    sum_C = tl.load(sums_ptr + num_chunks, mask=inside, other=0.0)
    total = highest + tl.log(tl.sum(sum_C * tl.exp(highest_C - highest), 0))
    for first in range(0, num_tokens, TOKENS):
        index = first + tl.arange(0, TOKENS)
        token = tl.load(tokens_ptr + row * num_tokens + index, mask=index < num_tokens, other=0)
        x = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32) - total
        x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + row * num_tokens + index, x, mask=index < num_tokens)


def logprobs_at(logits_RV: Tensor, tokens_RK: Tensor) -> Tensor:
    """float32 [R, K]: log-softmax of each row at its tokens (int64), at least the lowest float."""
    rows, vocab = logits_RV.shape
    tokens_RK = tokens_RK.contiguous()
    num_tokens = tokens_RK.shape[1]
    chunks = cdiv(vocab, _CHUNK)
    sums = torch.empty(rows, 2, chunks, dtype=torch.float32, device=logits_RV.device)
    out = torch.empty(rows, num_tokens, dtype=torch.float32, device=logits_RV.device)
    stride = logits_RV.stride(0)
    launch(sum_kernel, (rows, chunks), (logits_RV, sums), (vocab, stride, chunks), num_warps=8)
    launch(
        logprob_kernel, (rows,),
        (logits_RV, sums, tokens_RK, out), (stride, chunks, num_tokens),
        BLOCK=max(_FEW_CHUNKS, next_power_of_2(chunks)), TOKENS=32, num_warps=4,
    )  # fmt: skip
    return out
