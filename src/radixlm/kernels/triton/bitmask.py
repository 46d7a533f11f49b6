"""Grammar masks on logits: bit i of word w allows token 32 w + i.

Legend: R rows, V vocabulary, W words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch

_BLOCK = 4096


@triton.jit
def is_forbidden(words_ptr, token, inside):
    """Whether the row's words forbid the tokens."""
    word = tl.load(words_ptr + token // 32, mask=inside, other=0)
    return inside & (((word >> (token % 32)) & 1) == 0)


@triton.jit
def bitmask_kernel(logits_ptr, mask_ptr, vocab, logits_stride, mask_stride, BLOCK: tl.constexpr):
    """Program (r, i): a block of row r."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = is_forbidden(mask_ptr + row * mask_stride, token, token < vocab)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, nothing, mask=is_out)


def apply_mask_(logits_RV: Tensor, mask_RW: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf. mask_RW: int32, W = ceil(V / 32) or more."""
    rows, vocab = logits_RV.shape
    launch(
        bitmask_kernel, (rows, cdiv(vocab, _BLOCK)),
        (logits_RV, mask_RW), (vocab, logits_RV.stride(0), mask_RW.stride(0)),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
