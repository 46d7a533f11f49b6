"""Sampling of rows in C++: penalties, bias, mask and held-back tokens in place, then the draw.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixlm.kernels.cpu.extension import native

# struct SampleRow of csrc/common/api.h
_ROW = struct.Struct("=7QQq2i6f2i")


@dataclass(slots=True)
class Row:
    """What one row asks for. Addresses are of arrays that outlive the call; 0: none."""

    key: int = 0  # noise.draw_keys, unsigned
    is_greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0  # the vocabulary's size means no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seen: int = 0  # bool [V]
    counts: int = 0  # int32 [V]
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)  # repetition, frequency, presence
    bias: tuple[int, int, int] = (0, 0, 0)  # int64 ids, float32 values, how many
    mask: int = 0  # int32 words
    suppressed: tuple[int, int] = (0, 0)  # int64 ids, how many


def takes(logits_RV: Tensor) -> bool:
    """Whether ``sample`` can work on these logits."""
    return logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1


def sample(logits_RV: Tensor, rows: Sequence[Row], num_threads: int = 0) -> Tensor:
    """int64 [R] tokens. ``logits_RV`` float32 with contiguous rows, changed in place."""
    if not takes(logits_RV):
        raise ValueError("logits: expected float32 with contiguous rows")
    extension, num_rows = native(), len(rows)
    assert extension.SAMPLE_ROW_BYTES == _ROW.size and logits_RV.shape[0] == num_rows
    packed = bytearray(num_rows * _ROW.size)
    first, step = logits_RV.data_ptr(), logits_RV.stride(0) * 4
    for i, row in enumerate(rows):
        _ROW.pack_into(
            packed, i * _ROW.size,
            first + i * step, row.seen, row.counts, row.bias[0], row.bias[1], row.mask,
            row.suppressed[0], row.key, row.top_k, row.bias[2], row.suppressed[1],
            row.temperature, row.top_p, row.min_p, *row.penalties, row.is_greedy, 0,
        )  # fmt: skip
    table = torch.frombuffer(packed, dtype=torch.uint8)
    tokens_R = torch.empty(num_rows, dtype=torch.int64)
    extension.sample(
        table.data_ptr(), num_rows, logits_RV.shape[1], tokens_R.data_ptr(), num_threads
    )
    return tokens_R
