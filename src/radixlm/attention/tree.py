"""Which of a step's own tokens see one another, as bits: trees of guesses, and runs of tokens
(images) that see one another forwards.

Legend: T packed tokens, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.kernels.triton.attention_run import TreeMask
from radixlm.step.batch import ForwardBatch


def tree_mask_of_runs(batch: ForwardBatch) -> TreeMask:
    """All before a token and, within the runs of ``batch.bidirectional_spans``, the whole run."""
    num_tokens, device = batch.num_tokens, batch.device
    end_T = torch.arange(1, num_tokens + 1, device=device)
    for first, count in batch.bidirectional_spans:
        end_T[first : first + count] = first + count
    start_S1 = batch.query_start_S1.long()
    start_T = torch.repeat_interleave(start_S1[:-1], start_S1.diff(), output_size=num_tokens)
    num_words = -(-batch.max_query_len // 32)
    word_W = torch.arange(num_words, device=device) * 32
    num_bits_TW = ((end_T - start_T)[:, None] - word_W).clamp(0, 32)
    return TreeMask(((1 << num_bits_TW) - 1).to(torch.int32), batch.positions_T)


def pack_tree_masks(masks: Sequence[Tensor], positions_T: Tensor) -> TreeMask:
    """bool [n, n] for each sequence of the step: row i sees column j of its n new tokens."""
    width = -(-max(mask.shape[0] for mask in masks) // 32) * 32
    rows = [torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks]
    bit_32 = 1 << torch.arange(32, device=positions_T.device)
    bits_TW = (torch.cat(rows).view(-1, width // 32, 32) * bit_32).sum(-1)
    return TreeMask(bits_TW.to(torch.int32), positions_T)
